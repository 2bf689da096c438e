"""The network's two ends: 3x3(x3) convolutions with few channels in (stem) or few out (head), stride 1, padding 1.

Why: general convolution kernels pad 3 channels in, or 1 channel out, to a width made for 64 and more, and take ten times what the
bytes need. At both ends the work is to move the one wide tensor once: stem_conv.py writes it, head_conv.py reads it.
"""

from voxtune.kernels.head_conv import PackedHead, head, head_reference, pack_head, why_not_head
from voxtune.kernels.stem_conv import FEW, PackedStem, pack_stem, stem, stem_reference, why_not_stem

__all__ = [
    "FEW",
    "PackedHead",
    "PackedStem",
    "head",
    "head_reference",
    "pack_head",
    "pack_stem",
    "stem",
    "stem_reference",
    "why_not_head",
    "why_not_stem",
]
