"""A rewritten graph on disk, so that the next process need not capture and rewrite the network again.

The graph is JSON, the weights are tensors alone: reading one runs no code, and only operators of PyTorch and of this project
are looked up. It is used for exactly the weights, inputs, card, versions and source that it was made with.
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

from voxtune.files import one_line, replacing
from voxtune.plan.graph import module_of
from voxtune.plan.passes.base import register_operators

log = logging.getLogger("voxtune")
# As many as a user works with in turn; a whole-head network's takes 80 MB.
KEEP = 8
NAMESPACES = ("aten", "voxtune", "prims")
PLAIN = {"getitem": operator.getitem, "add": operator.add, "mul": operator.mul, "sub": operator.sub}
# Values of an operator's arguments that JSON has no word for.
WORDS: dict[str, Any] = {
    str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype | torch.memory_format | torch.layout)
}


class NotKeepableError(ValueError):
    """A graph with something in it that this form has no word for."""


@cache
def sources_hash() -> str:
    """Of the passes and kernels: another version of them may rewrite otherwise."""
    root = Path(__file__).parent.parent
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted([*(root / "plan").rglob("*.py"), *(root / "kernels").rglob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def keep(path: Path, module: nn.Module, notes: dict[str, str], device: torch.device) -> None:
    """Best effort: what cannot be kept costs the next process its time."""
    try:
        if not isinstance(module, fx.GraphModule):
            raise NotKeepableError("nothing was rewritten")
        told, tensors = _describe(module, device)
        head = json.dumps({"source": sources_hash(), "notes": notes, **told})
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            torch.save({"graph": head, "tensors": tensors}, part)
        for old in sorted(path.parent.glob("*.graph"), key=lambda p: p.stat().st_mtime)[:-KEEP]:
            old.unlink(missing_ok=True)
    except (NotKeepableError, OSError, NotImplementedError, TypeError) as error:
        log.info("the rewritten graph is not kept: %s", one_line(error))


def kept(path: Path, device: torch.device) -> tuple[fx.GraphModule, dict[str, str]] | None:
    """The graph and its passes' notes; None where there is none, or none of this source."""
    if not path.exists():
        return None
    try:
        found = torch.load(path, map_location=device, weights_only=True)
        told = json.loads(found["graph"])
        if told["source"] != sources_hash():
            return None
        module = _make(told, found["tensors"], device)
        os.utime(path)
        return module, told["notes"]
    except Exception as error:  # a damaged file shows itself in many ways, and there is always the longer way
        log.warning("a kept graph is passed over (%s): %s: %s", path, type(error).__name__, one_line(error))
        return None


def _describe(module: fx.GraphModule, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    codegen = module.graph._codegen
    if not isinstance(codegen, _PyTreeCodeGen):
        raise NotKeepableError("its inputs are of no known structure")
    info = codegen.pytree_info
    nodes, tensors = [], {}
    for node in module.graph.nodes:
        line: dict[str, Any] = {"op": node.op, "name": node.name, "module": list(module_of(node))}
        if node.op == "get_attr":
            tensors[str(node.target)] = _constant(module, str(node.target))
            line["target"] = str(node.target)
        elif node.op == "call_function":
            line["target"] = _name(node.target)
            line["args"], line["kwargs"] = _told(node.args, device), _told(dict(node.kwargs), device)
        elif node.op == "output":
            line["args"] = _told(node.args, device)
        elif node.op == "placeholder":
            line["target"] = str(node.target)
        else:
            raise NotKeepableError(f"it holds a {node.op}")
        nodes.append(line)
    specs = {
        "orig_args": info.orig_args,
        "in": pytree.treespec_dumps(info.in_spec),
        "out": None if info.out_spec is None else pytree.treespec_dumps(info.out_spec),
    }
    return {"nodes": nodes, "specs": specs}, tensors


def _constant(module: nn.Module, path: str) -> Tensor:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, Tensor):
        raise NotKeepableError(f"{path} is no tensor")
    return found.detach()


def _name(target: Any) -> str:
    for name, function in PLAIN.items():
        if target is function:
            return name
    if isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES:
        return str(target)
    raise NotKeepableError(f"it calls {target}")


def _find(name: str) -> Any:
    if name in PLAIN:
        return PLAIN[name]
    namespace, operation, overload = name.split(".")
    if namespace not in NAMESPACES:
        raise NotKeepableError(f"it calls {name}")
    return getattr(getattr(getattr(torch.ops, namespace), operation), overload)


def _told(value: Any, device: torch.device) -> Any:
    """A value as JSON: what JSON has is itself; all else is a list that begins with its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, fx.Node):
        return ["node", value.name]
    if isinstance(value, tuple | list):
        return ["tuple" if isinstance(value, tuple) else "list", *(_told(v, device) for v in value)]
    if isinstance(value, dict):
        return ["dict", *([k, _told(v, device)] for k, v in value.items())]
    if isinstance(value, torch.device):
        if value.type != device.type:
            raise NotKeepableError(f"it names the device {value}")
        return ["device"]
    if str(value) in WORDS:
        return ["word", str(value)]
    raise NotKeepableError(f"an argument is a {type(value).__name__}")


def _read(told: Any, nodes: dict[str, fx.Node], device: torch.device) -> Any:
    if not isinstance(told, list):
        return told
    kind, *rest = told
    if kind == "node":
        return nodes[rest[0]]
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)(_read(v, nodes, device) for v in rest)
    if kind == "dict":
        return {k: _read(v, nodes, device) for k, v in rest}
    return device if kind == "device" else WORDS[rest[0]]


def _make(told: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> fx.GraphModule:
    if any(line["op"] == "call_function" and line["target"].startswith("voxtune.") for line in told["nodes"]):
        register_operators()
    root, graph = nn.Module(), fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for path, tensor in tensors.items():
        _register(root, path, tensor)
    for line in told["nodes"]:
        if line["op"] == "output":
            graph.output(_read(line["args"], nodes, device)[0])
            continue
        args, kwargs = (_read(line.get(k, []), nodes, device) if k in line else () for k in ("args", "kwargs"))
        target = _find(line["target"]) if line["op"] == "call_function" else line["target"]
        node = graph.create_node(line["op"], target, tuple(args), dict(kwargs), line["name"])
        path, kind = line["module"]
        node.meta["nn_module_stack"] = {path: (path, kind)} if path or kind else {}
        nodes[line["name"]] = node
    specs = told["specs"]
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
