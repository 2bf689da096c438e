"""Run by the tests of the ladder in a separate process; prints one line of JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch

from voxtune.diffusion import DiffusionConfig, make_schedule, spaced_steps
from voxtune.workloads.convnext import ConvNeXtConfig, ConvNeXtUNet

GOLDEN = Path(__file__).parent.parent / "goldens" / "convnext_unet_tiny.npz"
INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
if INTERPRETED:
    from triton.runtime import interpreter

    # Overflow checks of integers take most of the interpreter's time; only test_golden keeps them.
    if sys.argv[1] != "golden":
        object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


def network(*multipliers: int) -> ConvNeXtUNet:
    torch.manual_seed(0)
    net = ConvNeXtUNet(ConvNeXtConfig(width=8, multipliers=multipliers)).eval().requires_grad_(False)
    for name, parameter in net.named_parameters():
        # Random norms and biases, as in a trained network: ones and zeros would hide errors.
        if parameter.dim() == 1:
            parameter.copy_(
                torch.randn(parameter.shape) * 0.3 + (1.0 if "block.0.w" in name or "block.3.w" in name else 0.0)
            )
    return net


def setting(
    net: ConvNeXtUNet, size: tuple[int, int], dtype: torch.dtype = torch.float32, steps: int = 1, batch: int = 1
):
    from voxtune.ladder.rungs import Setting

    schedule = make_schedule(DiffusionConfig(schedule="linear", steps=100))
    return Setting(
        network=net, size=size, schedule=schedule, timesteps=spaced_steps(100, steps), dtype=dtype, batch=batch
    )


def error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


def rungs(text: str, size: str, dtype: str, batch: str) -> list[dict]:
    """One step of each rung: error, and counts of launches and transfers."""
    from voxtune.ladder.climb import reference
    from voxtune.ladder.machine import Machine
    from voxtune.ladder.rungs import rungs_of

    height, width = map(int, size.split("x"))
    shared = setting(network(1, 2), (height, width), getattr(torch, dtype), batch=int(batch))
    x, t, truth = reference(shared)
    rows = []
    for rung in rungs_of(text):
        machine = Machine("cpu")
        runner = rung.make(shared, machine)
        if rung.number == 3:
            runner.large = 600  # use both versions of the layer norm
        y = runner(x, t)
        names = [e.name for e in machine.events if e.kind == "kernel"]
        rows.append(
            {
                "number": rung.number,
                "error": error(y, truth),
                "up": machine.count("up"),
                "down": machine.count("down"),
                "launches": len(names),
                "kernels": {name: names.count(name) for name in dict.fromkeys(names)},
                "claimed": list(rung.kernels),
            }
        )
    return rows


def golden() -> dict:
    from voxtune.ladder.program import Program
    from voxtune.ladder.sampling import denoise

    g = np.load(GOLDEN)
    net = ConvNeXtUNet(ConvNeXtConfig(width=8, multipliers=(1, 2))).eval().requires_grad_(False)
    net.load_state_dict({k[2:]: torch.from_numpy(g[k]) for k in g if k.startswith("w/")})
    program = Program(net, (16, 16), 1, dtype=torch.float32)
    program.eps.fill_(float("nan"))
    y = denoise(program, torch.from_numpy(g["x"])[:1], int(g["t"][0]))
    return {"error": error(y, torch.from_numpy(g["y"])[:1])}


def variants(extent: str) -> dict:
    """Split reductions, whole blocks, batches and non-square images: the error of each against float64."""
    from voxtune.kernels.convnext.tiles import Tile
    from voxtune.ladder.climb import reference
    from voxtune.ladder.program import Program
    from voxtune.ladder.sampling import denoise

    def tiles(**options):
        return lambda *shape: Tile(block_m=16, block_k=16, **options)

    cases = {
        "split": ((8, 8), 1, {"tiles": tiles(block_c=32, split=2)}),
        # Chunks that span several taps, iterations of several chunks, an uneven split.
        "split whole": ((8, 8), 1, {"tiles": tiles(block_c=32, ways=4, split=3), "whole": 64}),
        "ways": ((8, 8), 1, {"tiles": tiles(block_c=8, ways=2, near=False)}),
        "batch": ((8, 8), 2, {}),
        "oblong": ((8, 16), 1, {"whole": 32}),
        # The width is not a multiple of a run of pixels.
        "odd": ((8, 6), 1, {}),
        "as on a GPU": ((8, 8), 1, {"processors": 132}),
    }
    if extent == "quick":
        cases = {name: cases[name] for name in ("split whole", "oblong")}
    errors = {"gate": gate()}
    net = network(1)
    for name, (size, batch, options) in cases.items():
        x, t, truth = reference(setting(net, size, batch=batch))
        program = Program(net, size, batch, dtype=torch.float32, **options)
        program.eps.fill_(float("nan"))
        errors[name] = error(denoise(program, x, t), truth)
    return errors


def gate() -> float:
    """A gate whose hidden channels are divided among programs, run twice with the same buffers."""
    from voxtune.kernels.convnext.gate import gate_reference, voxtune_gate

    torch.manual_seed(0)
    M, C, CS, parts = 32, 24, 8, 2
    joint, w = torch.randn(M, C + CS), torch.zeros(48, 32)
    a, b, bias, v = torch.randn(C, C), torch.randn(C, CS), torch.randn(C), torch.randn(C)
    w[:C, :C], w[32 : 32 + CS, :C] = a.t(), b.t()
    pad = torch.nn.functional.pad
    scratch, count = torch.full((M * parts,), float("nan")), torch.zeros(2, dtype=torch.int32)
    worst = 0.0
    for _ in range(2):
        expected = gate_reference(joint[:, :C], joint[:, C:], a, b, bias, v, 0.5)
        voxtune_gate[(2 * parts,)](
            joint, w, pad(bias, (0, 8)), pad(v, (0, 8)), torch.tensor([0.5]), scratch, count,
            C=C, CS=CS, CP=32, LD=C + CS, BLOCK_M=16, BLOCK_C=16, BLOCK_H=16, BLOCK_S=8, PRECISION="ieee", CHAINED=False,
        )  # fmt: skip
        worst = max(worst, error(joint[:, C:], expected))
    return worst + float(count.abs().sum())


def loop() -> dict:
    """Two steps compared with the plain sampler with the same noise, and repeated, to detect leftover state."""
    from voxtune.diffusion.noise import noise_source
    from voxtune.diffusion.samplers import ddpm
    from voxtune.ladder.program import Program
    from voxtune.ladder.sampling import Loop

    net = network(1)
    two_steps = setting(net, (8, 8), steps=2)
    noises = noise_source(5, [2**40 + 3], (3, 8, 8))
    expected = ddpm(net, noises(0), two_steps.schedule, two_steps.timesteps, noise=noises)
    sampler = Loop(Program(net, (8, 8), 1, dtype=torch.float32), two_steps.schedule, two_steps.timesteps)
    plain = sampler.sample(5)
    first = sampler.sample(5, [2**40 + 3])
    return {
        "error": error(first, expected),
        "plain": bool(torch.equal(plain, sampler.sample(5))) and not torch.equal(plain, first),
        "again": bool(torch.equal(first, sampler.sample(5, [2**40 + 3]))),
        "launches": len(list(sampler.launches())),
        "planned": len(sampler.program.launches),
    }


def weights() -> dict:
    """Errors of the first step for each form of weight transfer, after the weights were set to NaN."""
    from voxtune.ladder.climb import reference
    from voxtune.ladder.program import Program
    from voxtune.ladder.sampling import begin
    from voxtune.ladder.weights import FORMS, Weights

    net = network(1)
    x, t, truth = reference(setting(net, (8, 8)))
    program = Program(net, (8, 8), 1, dtype=torch.float32)
    host_weights = Weights(program)
    terms = program.time_terms([t])[0]
    program.x.copy_(x.flatten(2))
    begin(program, draw=False)()
    errors = {}
    for form in FORMS:
        host_weights.clear()
        program.eps.fill_(float("nan"))
        host_weights.first_step(form, terms)
        errors[form] = error(program.eps.view_as(x), truth)
    parameters = sum(
        p.numel() for name, p in net.named_parameters() if "mlp" not in name and "in_conv.bias" not in name
    )
    return {"errors": errors, "bytes": host_weights.bytes, "parameters": parameters}


def plan() -> dict:
    """Launches of the full network at 64 x 64 on a GPU with 132 multiprocessors."""
    from voxtune.ladder.program import Program

    torch.manual_seed(0)
    net = ConvNeXtUNet(ConvNeXtConfig()).eval()
    plans = {}
    for whole in (0, 256):
        program = Program(net, (64, 64), 1, processors=132, whole=whole)
        names = [launch.name for launch in program.launches]
        joints = {unit.reads.data_ptr() for unit in program.units if unit.kind == "gate"}
        plans[str(whole)] = {
            "launches": len(names),
            "kernels": {name: names.count(name) for name in dict.fromkeys(names)},
            # An encoder block writes its skip directly into the buffer that a gate reads, without concatenation.
            "skips": sum(
                any(unit.writes.untyped_storage().data_ptr() == pointer for pointer in joints)
                for unit in program.units
                if unit.part.startswith("downs") and unit.kind == "block"
            ),
        }
    return plans


TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32", int: "i32"}


def compile_for(arch: int, kernel, arguments: tuple, constants: dict, warps: int, stages: int, **options) -> dict:
    """Registers, stack and instructions of a kernel compiled without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from voxtune.kernels.compiled import dump

    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    attributes = {}
    for position, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        signature[name] = TYPES[value.dtype if isinstance(value, torch.Tensor) else type(value)]
        if isinstance(value, torch.Tensor):
            attributes[position,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", arch, 32)
    binary = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages, **options})
    ptx = binary.asm["ptx"]
    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump(binary.asm["cubin"], "--dump-resource-usage"))
    assert usage
    return {
        "registers": int(usage[1]),
        "stack": int(usage[2]),
        "shared": binary.metadata.shared,
        "products": len(re.findall(r"(?:wgmma\.mma_async|mma)\.sync[^\n]*\.f32\.bf16\.bf16", ptx)),
        "wide_copies": len(re.findall(r"cp\.async\.cg\.shared\.global [^\n]*, 0x10", ptx)),
        "to_shared": len(re.findall(r"st\.shared", ptx)),
        "from_shared": len(re.findall(r"ld\.shared", ptx)),
        "from_memory": len(re.findall(r"ld\.global", ptx)),
        "shuffles": ptx.count("shfl.sync"),
        "atomics": len(re.findall(r"atom\.global", ptx)),
        "acquires": ptx.count("ld.global.acquire.gpu"),
        "chained": ptx.count("griddepcontrol.wait"),
    }


def compiled(arch: int, which: str) -> dict:
    """One kernel of each kind, at the sizes of the full network; `which` selects those of the upper rungs."""
    from voxtune.kernels.convnext.direct import voxtune_tiled
    from voxtune.kernels.convnext.im2col import voxtune_product
    from voxtune.kernels.convnext.layer_norm import voxtune_norm_warp
    from voxtune.ladder.program import Program

    f, b = torch.empty(16), torch.empty(16, dtype=torch.bfloat16)
    kernels = {
        "tiled": compile_for(
            arch, voxtune_tiled, (f, f, f, f, 64, 64, 64, 64, 64),
            {"SIDE": 3, "TAPS": 16, "TILE": 16, "BLOCK_K": 16, "ALONE": False}, 8, 3,
        ),
        "norm_warp": compile_for(arch, voxtune_norm_warp, (f, f, f, f, 4096, 64), {"EPS": 1e-5, "BLOCK": 4096}, 32, 3),
        "product": compile_for(
            arch, voxtune_product, (b, b, f, f, f, f, 4096, 64, 64),
            {"RP": 576, "AFTER": "gelu", "ADD": True, "SUMS": True, "TILES": 128, "BLOCK_M": 64, "BLOCK_K": 32, "BLOCK_R": 64,
             "PRECISION": "ieee"}, 4, 3,
        ),
    }  # fmt: skip
    net = ConvNeXtUNet(ConvNeXtConfig()).eval()
    names = {
        "downs.0.0.block.1": "conv",
        "ups.3.1.block.4": "conv_residual",
        "mid_block1.block.4": "conv_8x8",
        "ups.2.4": "up",
    }
    names |= {
        "downs.1.2": "down",
        "ups.3.1.in_conv": "depthwise",
        "ups.1.0": "gate",
        "init_conv": "stem",
        "final_conv": "end",
    }
    names = {part: name for part, name in names.items() if which == "all" or name in which.split(",")}
    for launch in Program(net, (64, 64), 1, processors=132).launches:
        if launch.part in names and (name := names[launch.part]) not in kernels:
            form = launch.chained() if arch >= 90 else launch
            kernels[name] = compile_for(
                arch, form.kernel, form.arguments, form.constants, form.warps, form.stages, **form.options
            )
    for launch in Program(net, (64, 64), 1, processors=132, whole=256).launches:
        if launch.part == "ups.0.1":
            kernels["block"] = compile_for(
                arch, launch.kernel, launch.arguments, launch.constants, launch.warps, launch.stages
            )
    return kernels


if __name__ == "__main__":
    check, *rest = sys.argv[1:]
    simple = {"golden": golden, "variants": variants, "loop": loop, "weights": weights, "plan": plan}
    print(
        json.dumps(
            rungs(*rest)
            if check == "rungs"
            else compiled(int(rest[0]), rest[1])
            if check == "compiled"
            else simple[check](*rest)
        )
    )
