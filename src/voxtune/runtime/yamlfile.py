"""YAML from people we do not know: plain values only, no aliases, no key twice, numbers as YAML 1.2 writes them."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from typing import Any

from voxtune.errors import InputError

# PyYAML follows YAML 1.1, to which 1e-5 is a string.
NUMBER = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")


def parse_yaml(text: str) -> Any:
    """The one document in `text`; InputError, or ValueError of a bad number or date, where it is none."""
    try:
        import yaml
    except ImportError:
        raise InputError("reading YAML needs PyYAML: install pyyaml, or write the config as .json") from None
    try:
        return yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        raise InputError(f"not valid YAML: {' '.join(str(error).split())[:300]}") from None
    except (KeyError, AttributeError, TypeError, IndexError) as error:
        # An explicit tag on a value of another kind (!!bool maybe) trips PyYAML's own constructors.
        raise InputError(f"not valid YAML: a tagged value does not fit its tag ({error})") from None


def parse_value(text: str) -> Any:
    """The value in an option such as `--set clip=1.0`; without PyYAML as JSON, and what is none is a plain word."""
    if importlib.util.find_spec("yaml") is not None:
        return parse_yaml(text)
    try:
        return json.loads(text)
    except ValueError:
        if set(text) & set("[]{}\"'"):
            raise InputError(f"{text[:80]}: not valid JSON, and PyYAML is not installed") from None
        return text


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            # A few aliases of aliases stand for gigabytes once anything prints or walks them.
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise InputError(f"line {mark.line + 1}: aliases (*name) are not taken; write the value out")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                name = getattr(key, "value", None)
                if isinstance(name, str) and name in seen:
                    raise InputError(f"line {key.start_mark.line + 1}: setting {name[:80]!r} is given twice")
                if isinstance(name, str):
                    seen.add(name)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))
    return Loader
