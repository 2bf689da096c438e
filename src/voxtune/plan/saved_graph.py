"""A rewritten graph on disk, so that the next process need not capture and rewrite the network again.

The graph is JSON and the weights are plain tensors: reading a file runs no code, and only operators of PyTorch and of this
project are looked up. A file is valid for exactly the weights, inputs, device, versions and source it was made with.
"""

from __future__ import annotations

import hashlib
import json
import logging
import operator
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from voxtune.errors import InputError
from voxtune.files import one_line, writing
from voxtune.kernels.elementwise_program import parse
from voxtune.plan.derivation import Derivation, Derived, Ref, function_of, name_of
from voxtune.plan.graph import module_of
from voxtune.plan.optimized import Optimized
from voxtune.plan.passes.base import register_operators
from voxtune.reading import parse_json
from voxtune.tensorfiles import read_torch

log = logging.getLogger("voxtune")
# Number of files in the cache; that of a whole-head network takes 80 MB.
MAX_FILES = 8
NAMESPACES = ("aten", "voxtune", "prims")
PLAIN = {"getitem": operator.getitem, "add": operator.add, "mul": operator.mul, "sub": operator.sub}
# Arguments of operators that JSON cannot represent, by name.
CONSTANTS: dict[str, Any] = {
    str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype | torch.memory_format | torch.layout)
}


class NotSerializableError(ValueError):
    """A graph that contains something this format cannot represent."""


@cache
def sources_hash() -> str:
    """Hash of the source of passes and kernels: another version may rewrite differently."""
    root = Path(__file__).parent.parent
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted([*(root / "plan").rglob("*.py"), *(root / "kernels").rglob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def save_graph(path: Path, network: Optimized) -> None:
    """Best effort: if the graph cannot be saved, only the next process takes longer."""
    try:
        module, device = network.runner.inner, network.signature.device
        if not isinstance(module, fx.GraphModule) or network.runner.weights is None:
            raise NotSerializableError("nothing was rewritten")
        description, tensors = _describe(module, device)
        derived = network.runner.weights.derived
        derivations = {name: _encode(derivation, device) for name, derivation in derived.derivations.items()}
        text = json.dumps({"source": sources_hash(), "notes": network.notes, "derivations": derivations, **description})
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path, state=True) as part:
            torch.save({"graph": text, "tensors": tensors, "fixed": derived.fixed}, part)
        for old in sorted(path.parent.glob("*.graph"), key=lambda p: p.stat().st_mtime)[:-MAX_FILES]:
            old.unlink(missing_ok=True)
    # On a full disk, the writer raises an InputError and torch.save a RuntimeError.
    except (NotSerializableError, InputError, OSError, RuntimeError, TypeError) as error:
        log.info("the rewritten graph is not saved: %s", one_line(error))


def load_graph(path: Path, device: torch.device) -> tuple[fx.GraphModule, dict[str, str], Derived] | None:
    """The graph, the notes of its passes and where its weights come from.

    None if there is no file, or one of another source version.
    """
    if not path.exists():
        return None
    try:
        content = read_torch(path)
        description = parse_json(content["graph"], path)
        if description["source"] != sources_hash():
            return None
        tensors = {name: tensor.to(device) for name, tensor in content["tensors"].items()}
        module = _build(description, tensors, device)
        derivations = {name: _decode(value, {}, device) for name, value in description["derivations"].items()}
        fixed = {name: tensor.to(device) for name, tensor in content["fixed"].items()}
        notes = description["notes"]
        if not isinstance(notes, dict) or not all(isinstance(text, str) for text in notes.values()):
            raise TypeError("the notes of the passes are not text")
        os.utime(path)
        return module, notes, Derived(derivations, fixed)
    except Exception as error:  # a damaged file raises many kinds of errors; the network can be rewritten instead
        log.warning("ignoring a saved graph (%s): %s: %s", path, type(error).__name__, one_line(error))
        return None


def _describe(module: fx.GraphModule, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    codegen = module.graph._codegen
    if not isinstance(codegen, _PyTreeCodeGen):
        raise NotSerializableError("unknown structure of inputs")
    info = codegen.pytree_info
    nodes, tensors = [], {}
    for node in module.graph.nodes:
        line: dict[str, Any] = {"op": node.op, "name": node.name, "module": list(module_of(node))}
        if node.op == "get_attr":
            tensors[str(node.target)] = _constant(module, str(node.target))
            line["target"] = str(node.target)
        elif node.op == "call_function":
            line["target"] = _name(node.target)
            line["args"], line["kwargs"] = _encode(node.args, device), _encode(dict(node.kwargs), device)
        elif node.op == "output":
            line["args"] = _encode(node.args, device)
        elif node.op == "placeholder":
            line["target"] = str(node.target)
        else:
            raise NotSerializableError(f"it contains a {node.op} node")
        nodes.append(line)
    specs = {
        "orig_args": info.orig_args,
        "in": pytree.treespec_dumps(info.in_spec),
        "out": None if info.out_spec is None else pytree.treespec_dumps(info.out_spec),
    }
    return {"nodes": nodes, "specs": specs}, tensors


def _constant(module: nn.Module, path: str) -> Tensor:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    if not isinstance(value, Tensor):
        raise NotSerializableError(f"{path} is not a tensor")
    return value.detach()


def _name(target: Any) -> str:
    for name, function in PLAIN.items():
        if target is function:
            return name
    if isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES:
        return str(target)
    raise NotSerializableError(f"it calls {target}")


def _find(name: str) -> Any:
    if name in PLAIN:
        return PLAIN[name]
    namespace, operation, overload = name.split(".")
    if namespace not in NAMESPACES:
        raise NotSerializableError(f"it calls {name}")
    function = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    if any(argument.name == "filename" for argument in function._schema.arguments):
        # aten.from_file creates the file that it maps.
        raise NotSerializableError(f"it opens a file by {name}")
    return function


def _encode(value: Any, device: torch.device) -> Any:  # noqa: PLR0911
    """A value as JSON: plain JSON values as they are, everything else as a list that starts with its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, fx.Node):
        return ["node", value.name]
    if isinstance(value, Ref):
        return ["weight", value.name]
    if isinstance(value, Derivation):
        own = getattr(value.function, "__module__", "").startswith("voxtune.")
        function = name_of(value.function) if own else _name(value.function)
        return ["derivation", function, _encode(value.args, device), _encode(value.kwargs, device)]
    if isinstance(value, tuple | list):
        return ["tuple" if isinstance(value, tuple) else "list", *(_encode(v, device) for v in value)]
    if isinstance(value, dict):
        return ["dict", *([k, _encode(v, device)] for k, v in value.items())]
    if isinstance(value, torch.device):
        if value.type != device.type:
            raise NotSerializableError(f"it names the device {value}")
        return ["device"]
    if str(value) in CONSTANTS:
        return ["word", str(value)]
    raise NotSerializableError(f"an argument is a {type(value).__name__}")


def _decode(value: Any, nodes: dict[str, fx.Node], device: torch.device) -> Any:  # noqa: PLR0911
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "node":
        return nodes[rest[0]]
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(_decode(v, nodes, device) for v in rest)
    if kind == "dict":
        return {k: _decode(v, nodes, device) for k, v in rest}
    if kind == "weight":
        return Ref(rest[0])
    if kind == "derivation":
        function = function_of(rest[0]) if ":" in rest[0] else _find(rest[0])
        return Derivation(function, *(_decode(part, nodes, device) for part in rest[1:]))
    return device if kind == "device" else CONSTANTS[rest[0]]


def _build(description: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> fx.GraphModule:
    if any(line["op"] == "call_function" and line["target"].startswith("voxtune.") for line in description["nodes"]):
        register_operators()
    root, graph = nn.Module(), fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for path, tensor in tensors.items():
        _register(root, path, tensor)
    for line in description["nodes"]:
        if line["op"] == "output":
            graph.output(_decode(line["args"], nodes, device)[0])
            continue
        args, kwargs = (_decode(line.get(k, []), nodes, device) if k in line else () for k in ("args", "kwargs"))
        target = _find(line["target"]) if line["op"] == "call_function" else line["target"]
        if line["target"] == "voxtune.elementwise.default":
            inputs, program = list(args)[:2]
            parse(program, len(inputs))
        node = graph.create_node(line["op"], target, tuple(args), dict(kwargs), line["name"])
        path, kind = line["module"]
        node.meta["nn_module_stack"] = {path: (path, kind)} if path or kind else {}
        nodes[line["name"]] = node
    specs = description["specs"]
    out = None if specs["out"] is None else pytree.treespec_loads(specs["out"])
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(specs["orig_args"], pytree.treespec_loads(specs["in"]), out)))
    graph.lint()
    return fx.GraphModule(root, graph)


def _register(root: nn.Module, path: str, tensor: Tensor) -> None:
    *parents, name = path.split(".")
    for part in parents:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    root.register_buffer(name, tensor)
