"""All steps of DDPM as one piece: on a GPU one CUDA graph, noise and update inside, nothing read from the host between steps."""

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
    """Compiles each different launch once, without running any; how many there were. On a CPU there is nothing to do."""
    different: dict[str, Launch] = {}
    for launch in launches:
        tensors = [a for a in launch.arguments if isinstance(a, Tensor)]
        if tensors and tensors[0].is_cuda:
            types = [str(a.dtype) if isinstance(a, Tensor) else "" for a in launch.arguments]
            key = (launch.name, types, sorted(launch.constants.items()), launch.warps, launch.stages, launch.options)
            different[repr(key)] = launch

    def rehearse() -> None:
        for launch in different.values():
            launch()

    if different:
        with compiled_ahead(rehearse):
            pass
    return len(different)


def coefficients(schedule: Schedule, timesteps: Sequence[int], clip: bool = True) -> Tensor:
    """(steps, 8): alpha, sigma, the weights of x_0, x and the noise, the draw's number, whether x_0 is clamped.

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
    """`sample` draws a batch. The graph is recorded once; seed and sample numbers are read by it from device memory."""

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
        """Every kernel once, compiled: a recording may not compile."""
        launches = [
            begin(self.program, draw=True),
            *self.program.step(self.terms[0], self.rows[0], chained=self.chained),
        ]
        compile_ahead(launches)
        for launch in launches:
            launch()
        torch.cuda.synchronize()

    def sample(self, seed: int, indices: Sequence[int] | None = None) -> Tensor:
        """(batch, channels, height, width) float32; the samples are numbered from 0 unless told."""
        program = self.program
        program.seed.fill_(seed)
        numbers = list(range(program.batch) if indices is None else indices)
        if numbers != self.numbers:  # only then: the copy makes the host wait for the image before
            program.index.copy_(torch.tensor(numbers, dtype=torch.int64))
            self.numbers = numbers
        if self.graph is not None:
            self.graph.replay()
        else:
            self.run()
        return program.x.view(program.batch, -1, *program.size).clone()


def begin(program: Program, *, draw: bool) -> Launch:
    """Draws the image that sampling starts from, or takes the one in `program.x`, and writes it as the stem reads it."""
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
    """The noise in x at step t, for a check against the network: one step without update."""
    program.x.copy_(x_NCHW.flatten(2))
    begin(program, draw=False)()
    for launch in program.step(program.time_terms([t])[0], None):
        launch()
    return program.eps.view_as(x_NCHW).clone()
