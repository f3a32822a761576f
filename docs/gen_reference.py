"""Writes the reference pages from the code when mkdocs builds the site: they cannot fall behind it.

reference/api.md            docstrings and signatures of the public names
reference/command-line.md   `paceline COMMAND --help` of every command
reference/settings.md       paceline.config.schema
reference/strategies.md     options of each file of paceline.parallel
reference/accelerate.md     paceline_accelerate.engine_fields
reference/deepspeed.md      paceline_deepspeed.config.keys, parts
reference/environment.md    paceline.base.env.TABLE
reports/*.md                benchmarks/reports and dev/reports, as they are
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Ranks|Shape|Example):\s*(.*)$")

ERRORS = "Each has a `code`, which [Errors](../errors.md) explains, and is a subclass of a matching error of Python."
API: dict[str, list[str]] = {
    "The run": ["Accelerator"],
    "Starting processes": ["notebook_launcher", "debug_launcher"],
    "In the loop": ["LocalSGD", "find_executable_batch_size", "set_seed", "skip_first_batches", "get_logger"],
    "Batches by tokens": ["TokenBatchSampler", "pack_documents", "PackedDocuments"],
    "World and plan": ["World", "Plan"],
    "Models larger than the device": [
        "paceline_large.inference.load",
        "paceline_large.inference.plan",
        "paceline_large.inference.place",
        "paceline_large.inference.Placement",
        "paceline_large.inference.Workload",
        "paceline_large.inference.Rates",
        "paceline_large.inference.measure_rates",
    ],
    "Testing your loop": [
        "paceline.testing.run_ranks",
        "paceline.testing.Fault",
        "paceline.testing.arm",
        "paceline.testing.damage",
    ],
}


class Bare:
    """An annotation that shows as its text; `inspect` would put quotes around it."""

    def __init__(self, annotation: Any) -> None:
        self.text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

    def __repr__(self) -> str:
        return self.text


def prose(doc: str) -> str:
    """A Google-style docstring as Markdown: sections become bold words, their items a list, examples code."""
    parts: list[tuple[str, str, list[str]]] = [("", "", [])]  # heading, the rest of its line, what follows
    before = ""
    for line in inspect.cleandoc(doc).split("\n"):
        heading = SECTION.match(line)
        if heading:
            parts.append((heading.group(1), heading.group(2), []))
        elif parts[-1][0] and line and not line.startswith(" ") and not before:
            parts.append(("", "", [line]))
        else:
            parts[-1][2].append(line)
        before = line
    return "\n\n".join(filter(None, (_part(*part) for part in parts)))


def _part(heading: str, first: str, lines: list[str]) -> str:
    if not heading:
        return _with_drawings("\n".join(lines).strip("\n"))
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    if heading == "Example":
        return f"**Example**\n\n```python\n{text}\n```"
    if heading in ("Args", "Attributes"):
        text = re.sub(r"^(\*{0,2}\w[\w.]*(?:, \*{0,2}\w+)*): ", r"- `\1`: ", text, flags=re.MULTILINE)
        return f"**{heading}**\n\n{text}"
    between = " " if first else "\n\n"
    return f"**{heading}**{between}" + "\n".join(filter(None, [first, text]))


def _with_drawings(text: str) -> str:
    """Indented lines stay as they are: Markdown shows them as code, given an empty line before."""
    return re.sub(r"(?<=\S)\n(?=    )", "\n\n", text, count=1) if "\n    " in text else text


def signature(name: str, function: Callable[..., Any], *, bound: bool = False) -> str:
    """A signature as a code block, over several lines where it is long; a context manager begins with `with`."""
    found = inspect.signature(function)
    shown = [_shown(one) for one in list(found.parameters.values())[1 if bound else 0 :]]
    gives = found.return_annotation
    found = found.replace(parameters=shown, return_annotation=gives if gives is found.empty else Bare(gives))
    if isinstance(function, type) or inspect.isgeneratorfunction(inspect.unwrap(function)):
        name = name if isinstance(function, type) else f"with {name}"
        found = found.replace(return_annotation=found.empty)
    text = f"{name}{found}"
    if len(text) > 100:
        arrow = str(found.replace(parameters=[]))[2:]
        text = f"{name}(\n" + "".join(f"    {one},\n" for one in _parameters(found)) + f"){arrow}"
    return f"```text\n{text}\n```"


def _shown(one: inspect.Parameter) -> inspect.Parameter:
    default = Bare("...") if repr(one.default) == "<factory>" else one.default
    return one.replace(
        default=default, annotation=one.annotation if one.annotation is one.empty else Bare(one.annotation)
    )


def _parameters(found: inspect.Signature) -> list[str]:
    """Each parameter as text, with the bare `*` before the first keyword-only one."""
    shown, star = [], False
    for one in found.parameters.values():
        star = star or one.kind is one.VAR_POSITIONAL
        if one.kind is one.KEYWORD_ONLY and not star:
            shown, star = [*shown, "*"], True
        shown.append(str(one))
    return shown


PROPERTIES = (property, cached_property)


def members(cls: type) -> list[str]:
    """Public names of a class in the order of their definition, its own after those of its bases."""
    order = [name for base in reversed(cls.__mro__[:-1]) for name in vars(base)]
    return [name for name in dict.fromkeys(order) if not name.startswith("_") and not _plain(cls, name)]


def _plain(cls: type, name: str) -> bool:
    return not (callable(getattr(cls, name)) or isinstance(inspect.getattr_static(cls, name), PROPERTIES))


def class_page(name: str, cls: type) -> list[str]:
    """A class: its docstring, its properties as a table, its methods."""
    lines = [f"### {name}", "", signature(name, cls), "", prose(cls.__doc__ or ""), ""]
    properties = [each for each in members(cls) if isinstance(inspect.getattr_static(cls, each), PROPERTIES)]
    if properties:
        lines += ["| property | |", "|---|---|"]
        docs = {each: inspect.getdoc(inspect.getattr_static(cls, each)) or "" for each in properties}
        lines += [f"| `{each}` | {' '.join(doc.split())} |" for each, doc in docs.items()] + [""]
    for each in members(cls):
        found = inspect.getattr_static(cls, each)
        if isinstance(found, PROPERTIES):
            continue
        # The navigation has room for the method's name only.
        lines += [
            f'#### {name}.{each} {{ data-toc-label="{each}" }}',
            "",
            signature(each, getattr(cls, each), bound=inspect.isfunction(found)),
            "",
        ]
        lines += [prose(inspect.getdoc(getattr(cls, each)) or ""), ""]
    return lines


def api() -> str:
    """The public names of `paceline`."""
    import paceline

    lines = [
        "# Python API",
        "",
        "A name without a package is imported from `paceline`. *Ranks* says which processes must call it, and what each gets.",
        "",
    ]
    for heading, names in API.items():
        lines += [f"## {heading}", ""]
        for name in names:
            package, _, last = name.rpartition(".")
            found = getattr(import_module(package or "paceline"), last)
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
        # `launch` is what most people look for.
        for name in sorted(commands(), key=lambda name: name != "launch"):
            lines += [f"## paceline {name}", "", "```text", parser_for(name).format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def settings() -> str:
    """All settings."""
    from paceline.config.schema import table
    from paceline.config.settings import RunSettings, launch_classes

    head = """# Settings

A setting such as `main_port` is `--main-port` on the command line of `paceline launch`, `PACELINE_MAIN_PORT` in the
environment and `main_port` in a YAML file. If it is given in several places, the order of precedence is: **code,
command line, environment, file, default**. `paceline explain` prints each value with its source.
"""
    run = "## Settings of a run\n\n`Accelerator(...)` reads them, with or without a launcher.\n\n" + table(RunSettings)
    launch = "## Settings of a launch\n\n`paceline launch` reads them.\n\n" + table(*launch_classes())
    return "\n".join([head, run, launch])


def environment() -> str:
    """All environment variables."""
    import paceline.config.settings  # noqa: F401  (its settings have variables too)
    from paceline.base.env import TABLE

    lines = ["# Environment variables", "", "Each [setting](settings.md) also has a variable `PACELINE_<NAME>`.", ""]
    lines += ["| variable | default | meaning |", "|---|---|---|"]
    for row in sorted(TABLE.values(), key=lambda row: row.name):
        default = "" if row.default in (None, "", False) else f"`{row.default}`"
        lines.append(f"| `{row.name}` | {default} | {row.doc} |")
    return "\n".join(lines) + "\n"


def strategies() -> str:
    """The options of every strategy."""
    from paceline.parallel.strategy import STRATEGIES
    from paceline.plan.options import rows

    head = """# Strategies and their options

A strategy is the code for an axis of the [plan](../concepts/plan.md), or for another change of the model. They are
listed in the order in which they are applied. An option, such as `reshard` of `shard`, can be given in several
places:

| place | how |
|---|---|
| code | `Accelerator(options={"shard": {"reshard": False}})` |
| a command | `paceline launch --option shard.reshard=no train.py`; a list is `--option 'shard.wrap=[Block, Head]'` |
| the environment | `PACELINE_OPTIONS='{shard: {reshard: no}}'` |
| a file | a block `options:` that contains a block `shard:` with `reshard: no` |

Options are merged one by one, with the precedence of all [settings](settings.md): code, command line, environment,
file, default.
"""
    lines = [head]
    for each in sorted(STRATEGIES, key=lambda one: (one.stage, one.name)):
        axes = "Axis: " + ", ".join(f"`{axis}`" for axis in each.axes) + ". " if each.axes else ""
        doc = (each.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
        lines += [f"## {each.name}", "", f"{axes}{' '.join(doc.split())}", ""]
        options = rows(each.Options)
        if options:
            lines += ["| option | default | values | what it does |", "|---|---|---|---|"]
        for name, default, expected, text in options:
            lines.append(
                "| "
                + " | ".join(cell.replace("|", "\\|") for cell in (f"`{name}`", _default(default), expected, text))
                + " |"
            )
        lines.append("")
    return "\n".join(lines)


def _default(value: Any) -> str:
    from paceline.config.schema import shown_value

    shown = ", ".join(map(str, value)) if isinstance(value, (tuple, list, frozenset, dict)) else shown_value(value)
    return (
        (f"`{shown}`" if len(shown) < 60 else "see the [how-to](../how-to/recompute-and-compile.md)")
        if shown
        else "empty"
    )


def accelerate() -> str:
    """What becomes of every field of accelerate's engines."""
    from paceline_accelerate.engine_fields import ROWS

    head = """# Fields of accelerate's engines

This page lists every field of accelerate 1.15's plugins for FSDP, parallelism and dynamo, with its flag, key and
variable. The last column says what the field means for Paceline. *The same* stands for the value that was given. For a
field without an effect, one message gives the reason; `paceline explain` lists all fields.
"""
    lines, owner = [head], ""
    for row in ROWS:
        if row.owner != owner:
            owner = row.owner
            lines += ["", f"## {owner.removeprefix('torch.distributed.fsdp.')}", ""]
            lines += ["| field | flag or key, variable | value | meaning |", "|---|---|---|---|"]
        said = ([f"`{row.name}`"] if row.takes is not None or row.variable else []) + [f"`{row.variable}`"] * bool(
            row.variable
        )
        for number, case in enumerate(row.cases):
            value = "any" if case.value == "*" else ", ".join(f"`{word}`" for word in case.value.split("|"))
            first = (f"`{row.attribute or row.name}`", ", ".join(said)) if number == 0 else ("", "")
            lines.append("| " + " | ".join((*first, value, _meaning(case))) + " |")
    return "\n".join(lines) + "\n"


def deepspeed() -> str:
    """What becomes of every key of a DeepSpeed config."""
    from paceline_deepspeed.config.keys import rows
    from paceline_deepspeed.config.parts import PARTS

    head = """# Keys of a DeepSpeed config

This page lists every key that DeepSpeed 0.19 reads, and what it means for Paceline. *Read* means that the engine (or
another part, which is named) uses the value unchanged. For a key without an effect, one message gives the reason. For
a refused key, the error says what to do instead. `paceline explain --deepspeed ds_config.json --procs 8` prints the
plan of a config, with the line of each value.

`null` always means the default. `"auto"` means the value that a trainer passes as a hint, or the default without one.
Comments, and trailing or missing commas, are accepted. An unknown key is an error that names the closest key.

DeepSpeed ignores the keys under `paceline`, which turn off some of its quirks. Other quirks are turned off by keys of
DeepSpeed: `gradient_clipping: 0` turns clipping off, and `adam_w_mode: false` in the `params` of an optimizer makes
`Adam` use plain Adam.
"""
    lines = [head]
    blocks = dict.fromkeys(row.name.rpartition(".")[0].partition(".")[0] for row in rows())
    for block in blocks:
        own = [row for row in rows() if row.name.rpartition(".")[0].partition(".")[0] == block]
        lines += ["", f"## {block or 'Top level'}", ""]
        lines += ["| key | default | purpose | value | meaning |", "|---|---|---|---|---|"]
        for row in own:
            plain = str(row.default).lower() if isinstance(row.default, bool) else str(row.default)
            default = "" if row.default in (None, "", {}, []) else f"`{plain}`"
            cases = [(_words(case), _meaning(case)) for case in row.cases]
            if not any(_words(case) == "any" for case in row.cases):
                cases.append(("else" if cases else "any", "read"))
            first: tuple[str, ...] = (f"`{row.name.removeprefix(f'{block}.')}`", default, row.doc)
            for value, meaning in cases:
                lines.append("| " + " | ".join((*first, value, meaning)) + " |")
                first = ("", "", "")
    for role, parts in PARTS.items():
        lines += ["", f"## Types of {role}", "", "| type | parameters |", "|---|---|"]
        for part in parts:
            if part.why:
                told = f"**refused**: {part.why}; {part.fix}"
            else:
                taken = [name for name, each in (part.params or {}).items() if not each.why]
                told = ", ".join(f"`{name}`" for name in taken) or "those of torch's"
            lines.append(f"| `{part.name}` | {told} |")
    return "\n".join(lines) + "\n"


def _words(case: Any) -> str:
    value = "any" if case.value == "*" else ", ".join(f"`{word}`" for word in case.value.split("|"))
    stages = getattr(case, "stages", "0123")
    return value if stages == "0123" else f"{value} at stage {', '.join(stages)}"


def _meaning(case: Any) -> str:
    if case.fix:
        return f"**refused**: {case.why}; {case.fix}"
    if not case.means:
        return "nothing" if case.why == "it asks for nothing" else f"no effect: {case.why}"
    return ", ".join(f"`{name}: {value}`" for name, value in case.means.items())


PAGES: dict[str, Callable[[], str]] = {
    "reference/api.md": api,
    "reference/command-line.md": command_line,
    "reference/settings.md": settings,
    "reference/strategies.md": strategies,
    "reference/accelerate.md": accelerate,
    "reference/deepspeed.md": deepspeed,
    "reference/environment.md": environment,
}


_INLINE_CODE = re.compile(r"(?<!</span>)<code>([^<\n]*)</code>")
_FLAG = re.compile(r"[^\s<>]{0,24}-[^\s<>]{0,24}(?=\s|$)")


def on_page_content(html: str, **kwargs: Any) -> str:
    """Puts each flag into a box that a browser does not break at its hyphens; called by mkdocs."""

    def with_boxes(found: re.Match[str]) -> str:
        text = _FLAG.sub(r'<span class="flag">\g<0></span>', found[1])
        return f"<code>{text}</code>"

    return _INLINE_CODE.sub(with_boxes, html)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages; called by mkdocs."""
    from mkdocs.structure.files import File

    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    for folder in ("benchmarks", "dev"):
        for report in sorted((ROOT / folder / "reports").glob("*.md")):
            content = report.read_text(encoding="utf-8")
            files.append(File.generated(config, f"reports/{report.name}", content=content))
    return files
