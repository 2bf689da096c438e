"""small_images: 2D networks whose images are so small that a step is mostly launches, in as few launches as possible.

    [cat] - depthwise convolution - [+ per channel]
    [cat | norm | pixel unshuffle | nearest x2] - convolution - [+ per channel] - [+ image | + 1x1 convolution] - [activation]
    sigmoid(1x1(relu(1x1(x) + 1x1(skip)))) * skip
    convolution of an image with few channels
    [sines and cosines of times] - linear - activation - linear - activation - linear

Each line becomes one operator. A norm of one group that alone reads one of these, and that one convolution alone reads, becomes
part of that convolution: a ConvNeXt block is then three launches. Larger convolutions are left to cuDNN."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from voxtune.plan.derivation import computes_weights
from voxtune.plan.graph import (
    CASTS,
    Captured,
    argument,
    aten,
    channel_sources,
    is_call,
    shape,
    sole_user,
    value,
    volume_inputs,
)
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage, register_operators
from voxtune.plan.passes.convolution import as_float, weights
from voxtune.plan.passes.norm import per_channel
from voxtune.plan.passes.resampling import NEAREST, per_axis
from voxtune.plan.passes.upsample import scale_of

CONVOLUTIONS = (aten.conv2d.default, aten.conv2d.padding)
# Operations of a convolution that a launch dominates (five microseconds on an H200), and pixels of all samples.
SMALL_OPERATIONS, SMALL_PIXELS = 1 << 29, 1 << 14
# The same where a norm becomes part of the convolution, and for gates: 64 images of 64 x 64 pixels, the largest measured.
MOST_OPERATIONS, MOST_PIXELS = 1 << 35, 1 << 18
# Values of the result of a depthwise convolution.
MOST_VALUES = 1 << 24
# Convolutions with fewer inputs or outputs are stems and heads.
LEAST_CHANNELS = 8
WAVES = [aten.sin.default, aten.cos.default]


@dataclass(frozen=True)
class ImageConvolution:
    """What a convolution computes, and of which image: the source is before a norm, an unshuffling or an upsampling."""

    source: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    side: int
    stride: int = 1
    depthwise: bool = False
    double: bool = False
    unshuffled: bool = False
    small: bool = True  # dominated by its launch

    @property
    def plain_1x1(self) -> bool:
        return self.side == 1 and self.stride == 1 and not self.double


@dataclass
class FusedConvolution:
    """A convolution and what follows it in one operator, up to `last`."""

    node: fx.Node
    form: ImageConvolution
    last: fx.Node
    terms: list[fx.Node] = field(default_factory=list)
    residual: fx.Node | None = None
    residual_form: ImageConvolution | None = None
    activation: str = "none"
    norm: fx.Node | None = None
    statistics: bool = False
    nodes: list[fx.Node] = field(default_factory=list)

    def take(self, node: fx.Node) -> None:
        self.nodes.append(node)
        self.last = node


def small_images(captured: Captured, context: Context, _options: dict[str, Any]) -> PassOutcome:
    register_operators()
    images = volume_inputs(captured)
    if not any(len(shape(image)) == 4 for image in images):
        return PassOutcome(0, "no 2D image")
    counts = {"time network": sum(_embedding(captured, node) for node in captured.nodes(aten.linear.default))}
    counts["gates"] = sum(_gate(captured, node, context.dtype) for node in captured.nodes(aten.mul.Tensor))
    counts["stems"] = sum(_stem(captured, node, images) for node in captured.nodes(*CONVOLUTIONS))
    captured.refresh()
    forms = {node: form for node in captured.nodes(*CONVOLUTIONS) if (form := _form(captured, node)) is not None}
    matches = _matches(captured, forms)
    _Emitter(captured, context.dtype).emit(matches)
    captured.refresh()
    counts["convolutions"] = len(matches)
    counts["norms"] = sum(match.norm is not None for match in matches)
    notes = [f"{count} {what}" for what, count in counts.items() if count]
    count = sum(counts.values()) - counts["norms"]
    return PassOutcome(count, None if count else "no small 2D convolution", notes)


def _geometry(node: fx.Node) -> tuple[int, int, int] | None:
    """(taps, stride, padding) of a convolution that is the same along both axes, without dilation; or None."""
    kernel = shape(argument(node, "weight"))[2:]
    padding = argument(node, "padding")
    if isinstance(padding, str):
        if padding == "same" and kernel[0] % 2 == 0:
            return None
        paddings: tuple[int, ...] = tuple(k // 2 for k in kernel) if padding == "same" else (0, 0)
    else:
        paddings = per_axis(node, "padding")
    strides = per_axis(node, "stride")
    if any(d != 1 for d in per_axis(node, "dilation")) or any(len(set(x)) != 1 for x in (kernel, strides, paddings)):
        return None
    return kernel[0], strides[0], paddings[0]


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _form(captured: Captured, node: fx.Node) -> ImageConvolution | None:
    """The form of a small convolution that has a kernel, or None."""
    from voxtune.kernels import conv2d, depthwise2d

    constants, geometry = weights(captured, node), _geometry(node)
    if constants is None or geometry is None:
        return None
    (weight, bias), (side, stride, padding) = constants, geometry
    taps, source = argument(node, "weight"), _source(node)
    N, K, H, W = shape(node)
    groups, C = argument(node, "groups"), shape(source)[1]
    if padding != (side // 2 if side % 2 else 0):
        return None
    if groups > 1:
        fits = groups == C == K and side in depthwise2d.SIDES and stride == 1 and N * H * W * C <= MOST_VALUES
        return ImageConvolution(source, taps, bias, side, depthwise=True) if fits else None
    pixels, operations = N * H * W, 2 * N * H * W * weight.numel()
    if min(C, K) < LEAST_CHANNELS or pixels > MOST_PIXELS or operations > MOST_OPERATIONS:
        return None
    form = ImageConvolution(
        source, taps, bias, side, stride, small=pixels <= SMALL_PIXELS and operations <= SMALL_OPERATIONS
    )
    alone = sole_user(source) is node
    if form.plain_1x1 and alone and is_call(source, aten.pixel_unshuffle.default) and source.args[1] == 2:
        form = replace(form, source=_source(source), side=2, stride=2, unshuffled=True)
    elif stride == 1 and side % 2 and alone and is_call(source, *NEAREST) and scale_of(source) == (2, 2):
        form = replace(form, source=_source(source), double=True)
    if any(size % form.stride for size in shape(form.source)[2:]):
        return None
    return form if conv2d.unsupported((H, W), form.side, form.stride, form.double) is None else None


def _matches(captured: Captured, forms: dict[fx.Node, ImageConvolution]) -> list[FusedConvolution]:
    """What becomes one operator each, in the order of the graph."""
    matches: list[FusedConvolution] = []
    by_last: dict[fx.Node, FusedConvolution] = {}
    # Nodes that belong to a match.
    taken: set[fx.Node] = set()
    for node, form in forms.items():
        if node in taken:
            continue
        match = _follow(FusedConvolution(node, form, node), taken)
        norm = form.source
        folds = norm.args[:1] and norm.args[0] in by_last and _folds(captured, norm, form)
        if not form.small and not folds:
            continue
        if match.residual is not None and match.residual not in taken:
            other = forms.get(match.residual)
            if other is not None and other.plain_1x1 and sole_user(match.residual) is not None:
                taken.add(match.residual)
                match.residual_form = other
            elif form.plain_1x1 and not match.terms and _ends_convolution(match.residual, forms, taken):
                continue  # the other convolution takes this one
        if folds:
            match.norm = norm
            by_last[norm.args[0]].statistics = True  # type: ignore[index]
        taken.update(match.nodes)
        matches.append(match)
        by_last[match.last] = match
    return matches


def _ends_convolution(node: fx.Node, forms: dict[fx.Node, ImageConvolution], taken: set[fx.Node]) -> bool:
    """Whether a node is a convolution that can take a residual, or one with addends per channel; each has one reader."""
    while sole_user(node) is not None and node not in taken:
        if node in forms:
            return not forms[node].depthwise
        if not is_call(node, aten.add.Tensor):
            return False
        # The addends have one value per channel, or this is the end of another sum.
        volumes = [n for n in node.args if isinstance(n, fx.Node) and not per_channel(n, shape(node))]
        if len(volumes) != 1:
            return False
        node = volumes[0]
    return False


def _folds(captured: Captured, norm: fx.Node, form: ImageConvolution) -> bool:
    """Whether a node is a norm that can become part of the convolution that reads it."""
    if not is_call(norm, aten.group_norm.default) or len(norm.users) != 1 or argument(norm, "num_groups") != 1:
        return False
    affine = [argument(norm, name) for name in ("weight", "bias")]
    return form.stride == 1 and not form.double and all(captured.constant(a) is not None for a in affine)


def _follow(match: FusedConvolution, taken: set[fx.Node]) -> FusedConvolution:
    """Takes the operators after the convolution; each is the only reader of the one before."""
    while True:
        user = sole_user(match.last)
        if user is None or user.op != "call_function" or user in taken:
            return match
        if is_call(user, aten.add.Tensor) and argument(user, "alpha") == 1:
            other = user.args[1] if user.args[0] is match.last else user.args[0]
            if not isinstance(other, fx.Node) or other is match.last:
                return match
            if per_channel(other, shape(user)) and shape(user) == shape(match.last):
                match.terms.append(other)
            elif not match.form.depthwise and match.residual is None and _alike(other, match.last, user):
                match.residual = other
            else:
                return match
            match.take(user)
            continue
        activation = _activation(user)
        if activation != "none" and not match.form.depthwise:
            match.activation = activation
            match.take(user)
        return match


def _alike(*nodes: fx.Node) -> bool:
    fakes = [value(node) for node in nodes]
    return len({(f.shape, f.dtype) if f is not None else None for f in fakes}) == 1


def _activation(node: Any) -> str:
    if is_call(node, aten.gelu.default):
        return "gelu_tanh" if argument(node, "approximate") == "tanh" else "gelu"
    return "silu" if is_call(node, aten.silu.default) else "relu" if is_call(node, aten.relu.default) else "none"


class _Emitter:
    """Replaces each match by its operator."""

    def __init__(self, captured: Captured, dtype: torch.dtype):
        self.captured, self.dtype = captured, dtype
        # What replaces the last node of each match; and the sums of what replaced it.
        self.images: dict[fx.Node, fx.Node] = {}
        self.sums: dict[fx.Node, fx.Node] = {}

    def emit(self, matches: list[FusedConvolution]) -> None:
        for match in matches:
            both = self._depthwise(match) if match.form.depthwise else self._convolution(match)
            y = self.captured.insert(match.last, operator.getitem, both, 0, of=match.node)
            if match.statistics:
                self.sums[y] = self.captured.insert(match.last, operator.getitem, both, 1, of=match.node)
            self.images[match.last] = y
            self.captured.replace(match.last, y)

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """One image, or two that are concatenated."""
        parts = channel_sources(node)
        if len(parts) == 2 and any(shape(part)[1] % 8 for part in parts):
            parts = [node]
        return [self.images.get(part, part) for part in parts]

    def _term(self, match: FusedConvolution) -> fx.Node | None:
        """All addends per channel as one (N or 1, C)."""
        total: fx.Node | None = None
        for term in match.terms:
            flat = self.captured.insert(match.last, aten.reshape.default, term, list(shape(term)[:2]))
            total = flat if total is None else self.captured.insert(match.last, aten.add.Tensor, total, flat)
        return total

    def _depthwise(self, match: FusedConvolution) -> fx.Node:
        from voxtune.kernels.depthwise2d import pack_taps

        form = match.form
        return self.captured.insert(
            match.last,
            torch.ops.voxtune.depthwise2d.default,
            self._sources(form.source),
            self.captured.derive("packed", pack_taps, form.weight, self.dtype),
            None if form.bias is None else self.captured.derive("bias", as_float, form.bias),
            self._term(match),
            form.side,
            of=match.node,
        )

    def _convolution(self, match: FusedConvolution) -> fx.Node:
        from voxtune.kernels.conv2d import pack_shift, pack_slope, pack_weight

        captured, form, extra = self.captured, match.form, match.residual_form
        weight = captured.derive("unshuffled", by_pixels, form.weight) if form.unshuffled else form.weight
        gamma = beta = slope = sums = None
        source, eps = form.source, 0.0
        if match.norm is not None:
            gamma, beta = argument(match.norm, "weight"), argument(match.norm, "bias")
            # The graph already names what replaced the norm's source.
            source, eps = match.norm.args[0], float(argument(match.norm, "eps"))  # type: ignore[assignment]
            slope, sums = captured.derive("slope", pack_slope, weight, gamma, self.dtype), self.sums[source]
        residual: list[fx.Node] = []
        residual_packed = None
        if extra is not None:
            residual = self._sources(extra.source)
            residual_packed = captured.derive("packed", pack_weight, extra.weight, None, self.dtype)
        elif match.residual is not None:
            residual = [self.images.get(match.residual, match.residual)]
        return captured.insert(
            match.last,
            torch.ops.voxtune.conv2d.default,
            self._sources(source),
            captured.derive("packed", pack_weight, weight, gamma, self.dtype),
            captured.derive("shift", pack_shift, weight, form.bias, beta, None if extra is None else extra.bias),
            slope,
            sums,
            self._term(match),
            residual,
            residual_packed,
            match.activation,
            shape(match.node)[1],
            form.side,
            form.stride,
            form.double,
            eps,
            match.statistics,
            of=match.node,
        )


@computes_weights
def by_pixels(weight_K4C11: Tensor) -> Tensor:
    """The 2x2 weight on x that equals a 1x1 weight on pixel_unshuffle(x, 2)."""
    from voxtune.kernels.convnext.packing import unshuffled

    return unshuffled(weight_K4C11).contiguous()


def _stem(captured: Captured, node: fx.Node, images: list[fx.Node]) -> int:
    from voxtune.kernels import stem2d
    from voxtune.kernels.conv2d import pack_shift

    constants, geometry = weights(captured, node), _geometry(node)
    if constants is None or geometry is None or node.args[0] not in images or argument(node, "groups") != 1:
        return 0
    weight, (side, stride, padding) = constants[0], geometry
    # 3x3 stems are a matter of `edges`.
    if side not in stem2d.SIDES[1:] or stride != 1 or padding != side // 2:
        return 0
    if weight.shape[1] > stem2d.MOST_CHANNELS or weight.shape[0] < LEAST_CHANNELS:
        return 0
    if shape(node)[0] * math.prod(shape(node)[2:]) > MOST_PIXELS:
        return 0
    # The result has the weight's type: it is cast with all others, in the end.
    packed = captured.derive("packed", stem2d.pack_window, argument(node, "weight"))
    shift = captured.derive("shift", pack_shift, argument(node, "weight"), constants[1], None, None)
    args = (node.args[0], packed, shift, weight.shape[0], side)
    captured.replace(node, captured.insert(node, torch.ops.voxtune.stem2d.default, *args))
    return 1


@dataclass(frozen=True)
class GateConvolutions:
    """The three 1x1 convolutions of sigmoid(of_hidden(relu(of_x(x) + of_skip(skip)))) * skip."""

    of_x: fx.Node
    of_skip: fx.Node
    of_hidden: fx.Node


def _gate(captured: Captured, product: fx.Node, dtype: torch.dtype) -> int:
    from voxtune.kernels import gate2d

    gate = _match_gate(captured, product)
    if gate is None:
        return 0
    N, K, H, W = shape(gate.of_x)
    skip = gate.of_skip.args[0]
    if N * H * W > MOST_PIXELS or gate2d.unsupported((H, W), K, shape(skip)[1]) is not None:
        return 0
    biases = [b for n in (gate.of_x, gate.of_skip) if (b := argument(n, "bias")) is not None]
    last = argument(gate.of_hidden, "bias")
    weight_x, weight_skip = argument(gate.of_x, "weight"), argument(gate.of_skip, "weight")
    new = captured.insert(
        product,
        torch.ops.voxtune.gate2d.default,
        gate.of_x.args[0],
        skip,
        captured.derive("packed", gate2d.pack_gate, weight_x, weight_skip, dtype),
        captured.derive("bias", gate2d.pack_columns, *biases) if biases else _zeros(captured, gate2d.padded(K)),
        captured.derive("columns", gate2d.pack_columns, argument(gate.of_hidden, "weight")),
        _zeros(captured, 1) if last is None else captured.derive("bias", as_float, last),
        of=gate.of_hidden,
    )
    captured.replace(product, new)
    return 1


def _match_gate(captured: Captured, product: fx.Node) -> GateConvolutions | None:
    factors: list[Any] = [n for n in product.args if isinstance(n, fx.Node)]
    sigmoid = next((n for n in factors if is_call(n, aten.sigmoid.default)), None)
    if sigmoid is None or len(factors) != 2:
        return None
    skip = factors[1] if factors[0] is sigmoid else factors[0]
    of_hidden = sigmoid.args[0]
    hidden: Any = of_hidden.args[0] if _is_1x1(captured, of_hidden) else None
    total: Any = hidden.args[0] if is_call(hidden, aten.relu.default) else None
    if not is_call(total, aten.add.Tensor) or argument(total, "alpha") != 1:
        return None
    convs = [n for n in total.args if _is_1x1(captured, n)]
    if len(convs) != 2 or any(len(n.users) != 1 for n in (sigmoid, of_hidden, hidden, total, *convs)):
        return None
    of_x, of_skip = convs if convs[1].args[0] is skip else (convs[1], convs[0])
    fits = shape(of_hidden)[1] == 1 and shape(product) == shape(skip) and shape(of_x) == shape(of_skip)
    return GateConvolutions(of_x, of_skip, of_hidden) if fits and of_skip.args[0] is skip else None


def _zeros(captured: Captured, number: int) -> fx.Node:
    return captured.add_constant(torch.zeros(number, device=captured.device), "zeros")


def _is_1x1(captured: Captured, node: Any) -> bool:
    """A 1x1 convolution of stride 1 with constant weights."""
    if not is_call(node, *CONVOLUTIONS) or weights(captured, node) is None or argument(node, "groups") != 1:
        return False
    return _geometry(node) == (1, 1, 0)


def _embedding(captured: Captured, last: fx.Node) -> int:
    """Three linear layers with the same activation between them, for a few rows."""
    from voxtune.kernels.embedding import unsupported

    layers, activations = [last], set[str]()
    while len(layers) < 3:
        activated: Any = layers[0].args[0]
        before: Any = activated.args[0] if _activation(activated) != "none" else None
        if not is_call(before, aten.linear.default) or any(len(n.users) != 1 for n in (activated, before)):
            return 0
        activations.add(_activation(activated))
        layers.insert(0, before)
    parts = [(argument(n, "weight"), argument(n, "bias")) for n in layers]
    rows = layers[0].args[0]
    if len(activations) > 1 or any(captured.constant(part) is None for pair in parts for part in pair):
        return 0
    fake = value(rows)
    if fake is None or fake.dim() != 2 or fake.dtype != torch.float32:
        return 0
    if unsupported(fake.shape[0], [shape(weight)[1] for weight, _ in parts]) is not None:
        return 0
    times, frequencies, cosines_first = _waves(captured, rows)
    layers_of = [weight for weight, _ in parts], [bias for _, bias in parts], activations.pop()
    args = (times, frequencies, cosines_first, *layers_of)
    captured.replace(last, captured.insert(last, torch.ops.voxtune.embedding.default, *args))
    return 1


def _waves(captured: Captured, rows: Any) -> tuple[fx.Node, fx.Node | None, bool]:
    """(times, frequencies, whether the cosines are first) of cat([sin(t * f), cos(t * f)]); or the rows as they are."""
    from voxtune.kernels.embedding import TIMES

    as_they_are = (rows, None, False)
    waves: list[Any] = list(rows.args[0]) if is_call(rows, aten.cat.default) else []
    kinds = [wave.target for wave in waves if is_call(wave, *WAVES)]
    if len(waves) != 2 or sorted(kinds, key=str) != sorted(WAVES, key=str) or argument(rows, "dim") not in (1, -1):
        return as_they_are
    angle: Any = waves[0].args[0]
    if angle is not waves[1].args[0] or not is_call(angle, aten.mul.Tensor):
        return as_they_are
    frequencies = next((a for a in angle.args if captured.constant(a) is not None), None)
    times: Any = next((a for a in angle.args if a is not frequencies), None)
    N, D = shape(rows)
    if shape(times) != (N, 1) or shape(frequencies) not in ((D // 2,), (1, D // 2)):
        return as_they_are
    # The kernel casts whole numbers itself.
    if is_call(times, *CASTS) and (cast := value(times)) is not None and cast.dtype == torch.float32:
        times = times.args[0]
    given, factors = value(times), value(frequencies)
    if given is None or factors is None or given.dtype not in TIMES or factors.dtype != torch.float32:
        return as_they_are
    return times, frequencies, kinds[0] == aten.cos.default


SMALL_IMAGES = Pass(
    name="small_images",
    summary="convolutions of small 2D images with all that surrounds them in one launch each",
    stage=PassStage.CONVOLUTION,
    structural=True,
    has_gradients=False,
    needs_gpu=True,
    needs_channels_last=True,
    needs_half=True,
    rewrite=small_images,
)
