"""All DDPM steps as one CUDA graph, noise and update included; nothing is read from the host between steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from voxtune.diffusion import Schedule
from voxtune.kernels.convnext.launch import Launch
from voxtune.kernels.convnext.tiles import divisor
from voxtune.kernels.convnext.update import voxtune_begin
from voxtune.kernels.precompile import compiled_ahead
from voxtune.ladder.program import Program


def compile_ahead(launches: Iterable[Launch]) -> int:
    """Compiles each distinct launch once, without running it; returns their number (0 on a CPU)."""
    distinct: dict[str, Launch] = {}
    for launch in launches:
        tensors = [a for a in launch.arguments if isinstance(a, Tensor)]
        if tensors and tensors[0].is_cuda:
            types = [str(a.dtype) if isinstance(a, Tensor) else "" for a in launch.arguments]
            key = (launch.name, types, sorted(launch.constants.items()), launch.warps, launch.stages, launch.options)
            distinct[repr(key)] = launch

    def rehearse() -> None:
        for launch in distinct.values():
            launch()

    if distinct:
        with compiled_ahead(rehearse):
            pass
    return len(distinct)


def coefficients(schedule: Schedule, timesteps: Sequence[int], clip: bool = True) -> Tensor:
    """(steps, 8): alpha, sigma, the weights of x_0, x and the noise, the number of the draw, whether x_0 is clamped.

    As diffusion/samplers.py's ddpm (Ho et al. eq. 7): the last step adds no noise.
    """
    rows = []
    for i, (t, t_next) in enumerate(zip(timesteps, [*timesteps[1:], -1], strict=True)):
        alpha, sigma = schedule.signal_noise(t)
        alpha_next, sigma_next = schedule.signal_noise(t_next)
        beta = 1 - (alpha / alpha_next) ** 2
        of_noise = math.sqrt(beta) * sigma_next / sigma if t_next >= 0 else 0.0
        weights = (alpha_next * beta / sigma**2, (alpha / alpha_next) * (sigma_next / sigma) ** 2, of_noise)
        rows.append([alpha, sigma, *weights, float(i + 1), float(clip), 0.0])
    return torch.tensor(rows, dtype=torch.float64).float()


class Loop:
    """`sample` generates a batch. The graph is recorded once and reads random seed and sample numbers from device memory."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        timesteps: Sequence[int],
        *,
        chained: bool = False,
        clip: bool = True,
    ):
        self.program, self.chained = program, chained
        self.rows = coefficients(schedule, timesteps, clip).to(program.device)
        self.terms = program.time_terms(list(timesteps))
        self.numbers: list[int] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        if program.device.type == "cuda":
            self._record()

    def launches(self) -> Iterator[Launch]:
        """Every launch of every step, in order."""
        yield begin(self.program, draw=True)
        for terms, row in zip(self.terms, self.rows, strict=True):
            yield from self.program.step(terms, row, chained=self.chained)

    def run(self) -> None:
        for launch in self.launches():
            launch()

    def _record(self) -> None:
        self.warm()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        self.graph = graph

    def warm(self) -> None:
        """Compiles and runs every kernel once, since compilation is not possible while recording."""
        launches = [
            begin(self.program, draw=True),
            *self.program.step(self.terms[0], self.rows[0], chained=self.chained),
        ]
        compile_ahead(launches)
        for launch in launches:
            launch()
        torch.cuda.synchronize()

    def sample(self, seed: int, indices: Sequence[int] | None = None) -> Tensor:
        """(batch, channels, height, width) float32. `indices` are the sample numbers, by default 0, 1, ..."""
        program = self.program
        program.seed.fill_(seed)
        numbers = list(range(program.batch) if indices is None else indices)
        if numbers != self.numbers:  # only if they changed: the copy synchronises with the previous image
            program.index.copy_(torch.tensor(numbers, dtype=torch.int64))
            self.numbers = numbers
        if self.graph is not None:
            self.graph.replay()
        else:
            self.run()
        return program.x.view(program.batch, -1, *program.size).clone()


def begin(program: Program, *, draw: bool) -> Launch:
    """Generates the initial noise, or uses the image in `program.x`, and writes it in the layout of the stem."""
    batch, channels, pixels = program.x.shape
    block = divisor(pixels, 256)
    return Launch(
        kernel=voxtune_begin,
        programs=batch * pixels // block,
        arguments=(program.x, program.x4, program.seed, program.index),
        constants={"V": pixels, "C": channels, "BLOCK_V": block, "DRAW": draw},
        warps=2,
        part="noise",
    )


def denoise(program: Program, x_NCHW: Tensor, t: int) -> Tensor:
    """The predicted noise in x at timestep t, for a check against the network: one step without update."""
    program.x.copy_(x_NCHW.flatten(2))
    begin(program, draw=False)()
    for launch in program.step(program.time_terms([t])[0], None):
        launch()
    return program.eps.view_as(x_NCHW).clone()
