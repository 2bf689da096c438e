"""Class, precision, layout and architecture of a launch, from its operator and its name.

Pure functions; the first match wins. Kernels that move data inside another operator are recognised by their name, then
the operator decides, then the name. A class says what is computed. Only counters show whether tensor cores were used.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

CLASSES = (
    "memcpy",
    "memset",
    "layout",
    "padding",
    "conv_fprop",
    "conv_dgrad",
    "conv_wgrad",
    "conv_backward",  # a convolution's backward kernel that names neither of the two gradients
    "norm",
    "attention",
    "matmul",
    "optimizer",
    "triton",
    "cast",
    "copy",
    "cat",
    "upsample",
    "random",
    "reduce",
    "elementwise",
    "host",  # on a CPU: allocations, views and the wrappers around operators
    "unknown",
)


class Kernel(NamedTuple):
    kernel_class: str
    precision: str | None
    layout: str | None
    architecture: str | None


@lru_cache(maxsize=16384)
def classify(name: str, kind: str, op: str | None = None, phase: str | None = None) -> Kernel:
    """`name`, `kind`, `op` and `phase` as in the launch table."""
    return Kernel(_class(name, kind, op or "", phase), _precision(name), _layout(name), _architecture(name))


def _class(name: str, kind: str, op: str, phase: str | None) -> str:
    if kind in ("memcpy", "memset"):
        return kind
    text = op if kind == "cpu_op" else name
    for label, pattern in _MOVEMENT:
        if pattern.search(text):
            return label
    for label, pattern in _OPERATORS if op else ():
        if (label != "host" or kind == "cpu_op") and pattern.search(op):
            return _convolution(name, op, phase) if label == "convolution" else label
    for label, pattern in _NAMES:
        if pattern.search(text):
            return _convolution(name, op, phase) if label == "convolution" else label
    if phase == "optimizer":
        return "optimizer"
    return "host" if kind == "cpu_op" else "unknown"


def _rules(*rules: tuple[str, str]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((label, re.compile(pattern)) for label, pattern in rules)


# Helper kernels that libraries launch inside a convolution or matrix product: their own name precedes the operator. The
# operator of a fused kernel lists all that was fused; "convolution" in it is a bias or a cast.
_MOVEMENT = _rules(
    ("conv_fprop", r"^voxtune_(conv[23]d|depthwise2d|gate2d|doubling_conv|strided_conv|pointwise|stem|head)"),
    ("matmul", r"^voxtune_embedding"),
    ("norm", r"^voxtune_(moments|finalize|normalize|rms_norm)"),
    ("upsample", r"^voxtune_upsample"),
    ("random", r"^voxtune_noise"),
    ("elementwise", r"^voxtune_(add|elementwise)"),
    ("triton", r"^triton_(poi|red|per|for|spl)_"),
    (
        "layout",
        r"nchwToNhwc|nhwcToNchw|ncdhwToNdhwc|ndhwcToNcdhw|convertTensor|nhwc_to_nchw|nchw_to_nhwc|tensorTransform",
    ),
    ("padding", r"AddPadding|RemovePadding|constant_pad_nd|(?i:\bpad(ding)?_kernel)"),
    ("elementwise", r"setTensor\w*_kernel|scalePackedTensor|op_tensor_kernel"),
    ("cast", r"direct_copy_kernel.*(LoadWithCast|StoreWithCast)|(bfloat16|float16|float8)_copy_kernel"),
)

_OPERATORS = _rules(
    ("convolution", r"convolution|conv(_transpose)?[123]d|thnn_conv|slow_conv|conv_depthwise"),
    ("norm", r"(group|layer|batch|instance|rms)_norm"),
    ("attention", r"attention|softmax|_efficient_attention|_flash"),
    ("matmul", r"aten::(mm|bmm|addmm|baddbmm|addmv|mv|dot|linear|matmul|_scaled_mm|_addmm_activation)$|mkldnn_linear"),
    ("optimizer", r"_fused_adam|_fused_sgd|_foreach_"),
    ("cat", r"aten::(cat|stack|_cat)$"),
    ("upsample", r"upsample|interpolate|pixel_(un)?shuffle"),
    ("random", r"aten::(randn?|normal_?|uniform_?|randint|random_|bernoulli_?|native_dropout|randn_like)$"),
    ("copy", r"aten::(copy_|_to_copy|clone|contiguous|_copy_from)$"),
    ("reduce", r"aten::(sum|mean|amax|amin|max|min|prod|norm|linalg_vector_norm|all|any|argmax|cumsum|cumprod)$"),
    ("host", r"^(autograd::engine|torch::autograd::|\w+Backward\d*$|Optimizer\.|CompiledFunction|Torch-Compiled)"),
    (
        "host",
        r"aten::(empty\w*|resize_?|view|_unsafe_view|reshape|as_strided|t|transpose|permute|expand|select|slice)$",
    ),
    ("host", r"aten::(unsqueeze|squeeze|detach|alias|lift_fresh|set_|is_\w+|item|_local_scalar_dense|narrow|chunk)$"),
    ("host", r"^(detach|aten::(split|unbind|flatten|unflatten|view_as|to|result_type|zeros|zeros_like|ones|full\w*))$"),
    ("elementwise", r"aten::(add|sub|mul|div|neg|abs|sgn|sign|sqrt|rsqrt|exp|log|sin|cos|tanh|sigmoid|pow|square)_?$"),
    ("elementwise", r"aten::(silu|gelu|relu|threshold|leaky_relu|clamp|where|fill|zero|addcmul|addcdiv|lerp|maximum)"),
    ("elementwise", r"aten::(reciprocal|rsub|index|gather|arange|tril|triu|eq|ne|lt|le|gt|ge|bitwise_\w+|__\w+__)_?$"),
    ("elementwise", r"(silu|gelu|sigmoid|tanh|relu)_backward|hardtanh|mse_loss|l1_loss|minimum|remainder|floor"),
)

# Kernels of compiled regions and libraries, outside of any operator.
_NAMES = _rules(
    ("triton", r"^(triton_|voxtune_)"),
    ("attention", r"sdpa|flash|fmha"),
    ("convolution", r"wgrad|dgrad|fprop|convolve|scudnn|implicit_gemm|[Cc]onv(olution)?[123N]?[dD]|conv_depthwise"),
    (
        "norm",
        r"RowwiseMoments|GroupNorm|LayerNorm|layer_norm|ComputeFusedParams|GammaBeta|InternalGradients|batch_norm",
    ),
    ("norm", r"ComputeBackwardFusedParams|cunn_.*Norm|instance_norm"),
    ("attention", r"[Ss]oft[Mm]ax|attention"),
    ("matmul", r"gemm|cutlass|nvjet|gemv|splitKreduce|xmma|cublas|dot_kernel|reduce_1Block"),
    ("optimizer", r"multi_tensor_apply|FusedAdam|fused_adam"),
    ("copy", r"direct_copy|CopyFunctor|copy_device_to_device"),
    ("cat", r"CatArrayBatchedCopy"),
    ("upsample", r"upsample|pixel_shuffle"),
    ("random", r"distribution_|philox|curand|dropout"),
    ("reduce", r"reduce_kernel|ReduceOp|cub::|DeviceReduce|DeviceScan"),
    ("elementwise", r"elementwise|index_\w*kernel|arange|FillFunctor|tril_triu|gather|scatter|pointwise|CUDAFunctor"),
)


def _convolution(name: str, op: str, phase: str | None) -> str:
    """Forward, data gradient or weight gradient. cuDNN also computes data gradients with forward kernels."""
    match = re.search(r"wgrad|dgrad", name, re.IGNORECASE)
    if match:
        return f"conv_{match.group().lower()}"
    backward = "backward" in op or (phase == "backward" and "convolution" not in op)
    if not backward:
        return "conv_fprop"
    return "conv_dgrad" if "fprop" in name else "conv_backward"


# In a cuDNN or cuBLAS name, the first group of types is the storage type, the second the type of the arithmetic.
_XMMA = re.compile(r"_(tf32|bf16|f16|f32|f64|i8|e4m3|e5m2)\w*?_(tf32|bf16|f16|f32|f64|i8|e4m3|e5m2)(?=f|bf|i|e|_)")
# FP32 whatever else the name contains: operands stored in BF16 but multiplied in FP32; FP64 parameters of distributions.
_FP32 = re.compile(r"convolveNd_sgemm|wgrad2d_grouped_direct_kernel<[^>]*, float, float>|distribution_\w+<float")
# Kernels that copy untyped words or prepare a workspace.
_UNTYPED = re.compile(r"init_device_workspace|OpaqueType<|index_elementwise_kernel")
_OF_TYPE = {"tf32": "tf32", "bf16": "bf16", "f16": "fp16", "f32": "fp32", "f64": "fp64", "i8": "int"}
_PRECISIONS = _rules(
    ("tf32", r"tf32|s1688gemm_\d|s884tf32"),
    ("bf16", r"bf16|BFloat16|bfloat16|^nvjet_(sm\d+_)?t"),
    ("fp16", r"c10::Half|__half|\bhalf\b|float16|_h\d+816|h884|f16_s\d|wgmma_f16|^nvjet_(sm\d+_)?h"),
    ("fp32", r"sgemm|scudnn|simt_s"),
    ("fp64", r"\bdouble\b|dgemm"),
    ("fp32", r"\bfloat\b"),
    ("int", r"\b(long|int64_t|unsigned char|bool|signed char|int8_t)\b"),
)


def _precision(name: str) -> str | None:
    """The type of the arithmetic, if the name contains it; names of Triton kernels do not."""
    if name.startswith(("triton_", "voxtune_", "Memcpy", "Memset", "aten::")) or _UNTYPED.search(name):
        return None
    if _FP32.search(name):
        return "fp32"
    types = _XMMA.search(name)
    if types:
        return "tf32" if "tf32" in types.groups() else _OF_TYPE.get(types.group(2))
    # Sizes and indices are integers in every kernel: only the template arguments describe the data.
    body = name[name.find("<") :] if "<" in name else name
    for label, pattern in _PRECISIONS:
        if pattern.search(name if label in ("tf32", "bf16", "fp16") else body):
            return label
    return None


def _layout(name: str) -> str | None:
    if re.search(r"(?i)n\w*hw\w?_?to_?n\w*hw", name):
        return None  # a conversion has two layouts
    if re.search(r"(?i)nd?hwc", name):
        return "ndhwc"
    return "ncdhw" if re.search(r"(?i)ncd?hw", name) else None


_FAMILIES = {"maxwell": "sm50", "volta": "sm70", "turing": "sm75", "ampere": "sm80", "hopper": "sm90"}


def _architecture(name: str) -> str | None:
    match = re.search(r"(?:^|_)sm_?(\d{2,3})(?:_|$|x)|cutlass3?x?_(?:sm)?(\d{2,3})_", name)
    if match:
        return f"sm{match.group(1) or match.group(2)}"
    family = re.search("|".join(_FAMILIES), name)
    return _FAMILIES[family.group()] if family else None
