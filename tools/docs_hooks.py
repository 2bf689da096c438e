"""Hooks of the documentation build (mkdocs.yml).

- Links from a page to files outside docs/ (results, model cards) work in a checkout; the built site shows their paths instead.
- The command-line reference (docs/reference/cli.md) is completed with the help of every command.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+(?:benchmarks|src|tests|tools|[A-Z]+\.md)[^)#\s]*)(#[^)]*)?\)")
COMMANDS = "<!-- commands -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, command_reference())
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def as_path(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        text = match[1].strip("`")
        return f"`{path}`" if text == path else f"{match[1]} (`{path}`)"

    return LINK.sub(as_path, markdown)


def command_reference() -> str:
    """A section for each command: its summary, its arguments and its options, read from the parser itself."""
    import typer.main

    from voxtune.cli.main import app

    group: Any = typer.main.get_command(app)
    sections = []
    for name, command in group.commands.items():
        if not command.hidden:
            sections.append(_section(name, command))
    return "\n\n".join(sections)


def _section(name: str, command: Any) -> str:
    arguments = [p.human_readable_name for p in command.params if p.param_type_name == "argument"]
    lines = [
        f"## voxtune {name}",
        "",
        command.help or "",
        "",
        f"```\nvoxtune {' '.join([name, *arguments])} [OPTIONS]\n```",
        "",
    ]
    lines += ["| option | default | description |", "|---|---|---|"]
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        names = [*parameter.opts, *parameter.secondary_opts]
        title = parameter.human_readable_name if parameter.param_type_name == "argument" else ", ".join(names)
        choices = getattr(parameter.type, "choices", None)
        text = (getattr(parameter, "help", None) or "").replace("\n", " ")
        if choices:
            text += f" One of: {', '.join(str(getattr(c, 'value', c)) for c in choices)}."
        default = parameter.default
        shown = (
            "" if default is None or callable(default) or default is False else str(getattr(default, "value", default))
        )
        shown = "required" if parameter.required else shown
        lines.append(f"| `{title}` | {_cell(shown)} | {_cell(text)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
