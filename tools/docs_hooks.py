"""Hooks of the documentation build (mkdocs.yml).

- Links from a page to files outside docs/ (results, model cards) work in a checkout; the built site shows their paths instead.
- The command-line reference (docs/reference/cli.md) is completed with the help of every command.
- A page may include a Markdown file of the repository's root, or a notebook beside it.
"""

from __future__ import annotations

import enum
import json
import posixpath
import re
import typing
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+(?:benchmarks|src|tests|tools|[A-Z]+\.md)[^)#\s]*)(#[^)]*)?\)")
COMMANDS = "<!-- commands -->"
INCLUDE = re.compile(r"<!-- include ([A-Z]+\.md) -->")
NOTEBOOK = re.compile(r"<!-- notebook ([a-z_-]+\.ipynb) -->")
ROOT = Path(__file__).resolve().parent.parent


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    markdown = INCLUDE.sub(lambda match: included(match[1], posixpath.dirname(page.file.src_uri)), markdown)
    beside = ROOT / "docs" / posixpath.dirname(page.file.src_uri)
    markdown = NOTEBOOK.sub(lambda match: notebook(beside / match[1]), markdown)
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, command_reference())
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def as_path(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        text = match[1].strip("`")
        return f"`{path}`" if text == path else f"{match[1]} (`{path}`)"

    return LINK.sub(as_path, markdown)


def included(name: str, folder: str) -> str:
    """A file of the repository's root, with its links into docs/ relative to `folder`."""
    text = (ROOT / name).read_text()
    return re.sub(r"\]\(docs/([^)#]+)", lambda match: f"]({posixpath.relpath(match[1], folder)}", text)


def notebook(path: Path) -> str:
    """The cells of a notebook as Markdown."""
    cells = json.loads(path.read_text())["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if code else text for text, code in texts)


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
    arguments = [_title(p) for p in command.params if p.param_type_name == "argument"]
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
        title = _title(parameter) if parameter.param_type_name == "argument" else ", ".join(names)
        choices = _choices(parameter)
        text = (getattr(parameter, "help", None) or "").replace("\n", " ")
        if choices:
            text += f" One of: {', '.join(choices)}."
        default = parameter.default
        shown = (
            "" if default is None or callable(default) or default is False else str(getattr(default, "value", default))
        )
        shown = "required" if parameter.required else shown
        lines.append(f"| `{title}` | {_cell(shown)} | {_cell(text)} |")
    return "\n".join(lines)


def _title(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name).upper()


def _choices(parameter: Any) -> list[str]:
    """Of an option whose type is an enumeration or a literal type, or whose value is checked against a list."""
    click_type = getattr(parameter, "type", None)
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if getattr(click_type, "choices", None):
        return [str(getattr(c, "value", c)) for c in click_type.choices]
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return [str(member.value) for member in annotation]
    return (
        [str(value) for value in typing.get_args(annotation)] if typing.get_origin(annotation) is typing.Literal else []
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
