"""One colour per meaning in all figures: kernel classes, phases, precisions, configurations.

Related classes share a hue (convolutions blue, data movement orange to brown, norms green) and differ in lightness, for
readers with colour vision deficiency. Figures also label what they colour.
"""

from __future__ import annotations

UNKNOWN = "#a9adb3"

CLASSES = {
    "conv_fprop": "#1f5a96",
    "conv_dgrad": "#5b95cf",
    "conv_wgrad": "#a3c8ea",
    "conv_backward": "#7fadd9",
    "convolution": "#1f5a96",
    "matmul": "#00798c",
    "attention": "#6a45dd",
    "norm": "#009e73",
    "triton": "#8cd4c2",
    "elementwise": "#e3bd4b",
    "reduce": "#efe08a",
    "layout": "#d55e00",
    "padding": "#ee9350",
    "cast": "#6e1630",
    "copy": "#f6bd92",
    "cat": "#8c4a2f",
    "upsample": "#3c0557",
    "random": "#dcb0ce",
    "optimizer": "#454a66",
    "memcpy": "#5f646b",
    "memset": "#8a9098",
    "host": "#c3c7cd",
    "unknown": UNKNOWN,
}

PHASES = {
    "forward": "#1f5a96",
    "backward": "#e3bd4b",
    "optimizer": "#454a66",
    "transfer": "#d55e00",
    "other": UNKNOWN,
    "idle": "#dfe2e6",
}

PRECISIONS = {
    "fp32": "#5b95cf",
    "tf32": "#009e73",
    "bf16": "#e69f00",
    "fp16": "#cc79a7",
    "fp64": "#454a66",
    "int": "#9a7400",
}

# Instruction groups of mix.py, and the abbreviations of the paper.
INSTRUCTIONS = {
    "tensor": "#6f4aa0",
    "memory": "#d55e00",
    "move": "#f6bd92",
    "convert": "#e3bd4b",
    "predicate": "#b07aa1",
    "control": "#454a66",
    "uniform": "#56b4e9",
    "FP": "#5b95cf",
    "INT": "#9a7400",
    "LS": "#d55e00",
    "MV": "#f6bd92",
    "PRED": "#b07aa1",
    "CTRL": "#454a66",
    "UD": "#56b4e9",
    "TENSOR": "#6f4aa0",
    "OTHER": UNKNOWN,
}

MEMORY = {
    "weights": "#1f5a96",
    "gradients": "#5b95cf",
    "optimizer": "#454a66",
    "activations": "#e3bd4b",
    "workspace": "#d55e00",
    "inputs": "#009e73",
    "other": UNKNOWN,
}

# Components have the colour of their kernel class.
COMPONENTS = {
    "conv": CLASSES["convolution"],
    "group_norm": CLASSES["norm"],
    "layer_norm": CLASSES["norm"],
    "softmax": CLASSES["attention"],
    "linear": "#4db3c2",
    "fused (Triton)": CLASSES["triton"],
    "add": CLASSES["elementwise"],
    "mul": "#c99a1f",
    "silu": "#9a7400",
}

# The palette of Okabe and Ito and two more, ordered so that neighbours differ clearly.
SEQUENCE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#7a7f87",
    "#6f4aa0",
    "#9a7400",
    "#00798c",
)

NAMED = {**INSTRUCTIONS, **MEMORY, **COMPONENTS, **PRECISIONS, **PHASES, **CLASSES}


def colour(name: str, position: int = 0) -> str:
    """The colour of a name; other names take the colour at `position` of the sequence."""
    return NAMED.get(name) or in_sequence(position)


def in_sequence(position: int) -> str:
    """For series such as configurations, whose names may also be kernel classes or precisions."""
    return SEQUENCE[position % len(SEQUENCE)]


def on_dark(value: str) -> str:
    """The colour lightened for a dark page."""
    mixed = (round(c + (255 - c) * (0.2 if _luminance(value) < 0.16 else 0.08)) for c in _channels(value))
    return "#" + "".join(f"{c:02x}" for c in mixed)


def ink(value: str) -> str:
    """Black or white text, whichever has more contrast on the colour."""
    return "#ffffff" if _luminance(value) < 0.3 else "#16191d"


def _channels(value: str) -> tuple[int, int, int]:
    return int(value[1:3], 16), int(value[3:5], 16), int(value[5:7], 16)


def _luminance(value: str) -> float:
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in _channels(value)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
