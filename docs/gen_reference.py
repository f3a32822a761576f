"""Writes the reference pages from the code when mkdocs builds the site: they cannot fall behind it.

reference/api.md            docstrings and signatures of the public names
reference/command-line.md   `paceline COMMAND --help` of every command
reference/settings.md       paceline.config.schema
reference/environment.md    paceline.base.env.TABLE
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Ranks|Shape|Example|Note):\s*(.*)$")
ITEM = re.compile(r"^(\*{0,2}\w[\w.]*(?:, \w+)*): +(.*)$")

ERRORS = "Each carries the `code` of [the errors page](../errors.md), and subclasses the builtin that one would expect."
API: dict[str, list[str]] = {
    "The run": ["Accelerator"],
    "Starting": ["notebook_launcher", "debug_launcher"],
    "In the loop": ["LocalSGD", "find_executable_batch_size", "set_seed", "skip_first_batches", "get_logger"],
    "What a run knows": ["World", "Plan"],
    "Testing a loop of yours": ["testing.run_ranks"],
}


def prose(doc: str) -> str:
    """A Google-style docstring as Markdown: sections become bold words, their items a list."""
    lines, out, inside, literal = inspect.cleandoc(doc).split("\n"), [], "", False
    for line in lines:
        text = line.strip()
        heading = SECTION.match(line)
        if heading:
            inside = heading.group(1)
            out += ["", f"**{inside}** {heading.group(2)}".rstrip(), ""]
        elif inside in ("Args", "Attributes") and line.startswith("    ") and not line.startswith("     "):
            item = ITEM.match(text)
            out.append(f"- `{item.group(1)}`: {item.group(2)}" if item else f"- {text}")
        elif inside and line.startswith(" "):
            out.append(f"    {text}" if out and out[-1].startswith(("- ", "    ")) else text)
        elif line.startswith("    "):  # a drawing
            out += ["", line] if not literal else [line]
            literal = True
            continue
        else:
            if text:
                inside = ""
            out.append(text)
        literal = False
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out)).strip()


def signature(name: str, function: Callable[..., Any], *, bound: bool = False) -> str:
    """A signature as a code block, over several lines where it is long; a context manager begins with `with`."""
    found = inspect.signature(function)
    found = found.replace(parameters=list(found.parameters.values())[1 if bound else 0 :])
    if isinstance(function, type) or inspect.isgeneratorfunction(inspect.unwrap(function)):
        name = name if isinstance(function, type) else f"with {name}"
        found = found.replace(return_annotation=inspect.Signature.empty)
    text = f"{name}{found}"
    if len(text) > 100:
        arrow = str(found.replace(parameters=[]))[2:]
        text = f"{name}(\n" + "".join(f"    {one},\n" for one in _parameters(found)) + f"){arrow}"
    return "```text\n" + text.replace("'", "") + "\n```"


def _parameters(found: inspect.Signature) -> list[str]:
    """Each parameter as text, with the bare `*` before the first keyword-only one."""
    shown, star = [], False
    for one in found.parameters.values():
        star = star or one.kind is one.VAR_POSITIONAL
        if one.kind is one.KEYWORD_ONLY and not star:
            shown, star = [*shown, "*"], True
        shown.append(str(one))
    return shown


def members(cls: type) -> list[str]:
    """Public names of a class in the order of their definition, its own after those of its bases."""
    order = [name for base in reversed(cls.__mro__[:-1]) for name in vars(base)]
    return [name for name in dict.fromkeys(order) if not name.startswith("_") and not _plain(cls, name)]


def _plain(cls: type, name: str) -> bool:
    return not (callable(getattr(cls, name)) or isinstance(inspect.getattr_static(cls, name), property))


def class_page(name: str, cls: type) -> list[str]:
    """A class: its docstring, its properties as a table, its methods."""
    lines = [f"### {name}", "", signature(name, cls), "", prose(cls.__doc__ or ""), ""]
    properties = [each for each in members(cls) if isinstance(inspect.getattr_static(cls, each), property)]
    if properties:
        lines += ["| property | |", "|---|---|"]
        docs = {each: inspect.getdoc(inspect.getattr_static(cls, each)) or "" for each in properties}
        lines += [f"| `{each}` | {' '.join(doc.split())} |" for each, doc in docs.items()] + [""]
    for each in members(cls):
        found = inspect.getattr_static(cls, each)
        if isinstance(found, property):
            continue
        lines += [f"#### {name}.{each}", "", signature(each, getattr(cls, each), bound=inspect.isfunction(found)), ""]
        lines += [prose(inspect.getdoc(getattr(cls, each)) or ""), ""]
    return lines


def api() -> str:
    """The public names of `paceline`."""
    import paceline

    lines = [
        "# Python API",
        "",
        "Everything here is imported from `paceline`. *Ranks* says which processes must call",
        "",
    ]
    lines[-2] += " a function and what each gets."
    for heading, names in API.items():
        lines += [f"## {heading}", ""]
        for name in names:
            package, _, last = name.rpartition(".")
            found = getattr(import_module(f"paceline.{package}" if package else "paceline"), last)
            if isinstance(found, type):
                lines += class_page(name, found)
            else:
                lines += [f"### {name}", "", signature(name, found), "", prose(found.__doc__ or ""), ""]
    lines += ["## Errors", "", ERRORS, "", "| error | is a | |", "|---|---|---|"]
    for name in paceline.__all__:
        found = getattr(paceline, name)
        if isinstance(found, type) and issubclass(found, Exception):
            bases = ", ".join(f"`{base.__name__}`" for base in found.__bases__)
            lines.append(f"| `{name}` | {bases} | {(found.__doc__ or '').splitlines()[0]} |")
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """`--help` of every command."""
    from paceline.base import env
    from paceline.cli.main import commands, parser_for

    lines = ["# Command line", ""]
    with env.patched({"COLUMNS": "100", "NO_COLOR": "1"}):
        for name in commands():
            lines += [f"## paceline {name}", "", "```text", parser_for(name).format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def settings() -> str:
    """All settings."""
    from paceline.config.schema import table
    from paceline.config.settings import LaunchSettings, RunSettings

    head = """# Settings

A setting `main_port` is `--main-port` on the command line of `paceline launch`, `PACELINE_MAIN_PORT` in the environment
and `main_port` in a YAML file. Where several say something, this is the order: **code, command line, environment, file,
default**. `paceline explain` prints each value with where it came from.
"""
    run = "## Of a run\n\nRead by `Accelerator(...)`, under every launcher and under none.\n\n" + table(RunSettings)
    launch = "## Of a launch\n\nRead by `paceline launch`.\n\n" + table(LaunchSettings)
    return "\n".join([head, run, launch])


def environment() -> str:
    """All environment variables."""
    import paceline.config.settings  # noqa: F401  (its settings have variables too)
    from paceline.base.env import TABLE

    lines = ["# Environment variables", "", "Each [setting](settings.md) has a variable `PACELINE_<NAME>` as well.", ""]
    lines += ["| variable | default | |", "|---|---|---|"]
    for row in sorted(TABLE.values(), key=lambda row: row.name):
        default = "" if row.default in (None, "", False) else f"`{row.default}`"
        lines.append(f"| `{row.name}` | {default} | {row.doc} |")
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "reference/api.md": api,
    "reference/command-line.md": command_line,
    "reference/settings.md": settings,
    "reference/environment.md": environment,
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages; called by mkdocs."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    return files
