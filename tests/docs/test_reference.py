"""The generated reference pages hold every public name, setting, variable and command."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_reference", ROOT / "docs" / "gen_reference.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_described(reference: ModuleType) -> None:
    import paceline

    page = reference.api()
    missing = [name for name in paceline.__all__ if not name.startswith("__") and f"{name}" not in page]
    assert not missing
    names = [name for name in dir(paceline.Accelerator) if not name.startswith("_")]
    undescribed = [name for name in names if f"Accelerator.{name} {{" not in page and f"| `{name}` |" not in page]
    assert not undescribed


def test_every_command_is_described(reference: ModuleType) -> None:
    from paceline.cli.main import commands

    page = reference.command_line()
    assert commands() and all(f"## paceline {name}\n" in page for name in commands())


def test_every_setting_is_described(reference: ModuleType) -> None:
    from paceline.config.settings import settings_of

    page = reference.settings()
    assert all(f"| `{name}` |" in page for name in settings_of())


def test_every_option_is_described(reference: ModuleType) -> None:
    from paceline.parallel.strategy import STRATEGIES
    from paceline.plan.options import rows

    page = reference.strategies()
    for strategy in STRATEGIES:
        section = page.partition(f"\n## {strategy.name}\n")[2].partition("\n## ")[0]
        assert section and all(f"| `{name}` |" in section for name, *_ in rows(strategy.Options))


def test_every_key_of_deepspeeds_is_described(reference: ModuleType) -> None:
    from paceline_deepspeed.config.keys import blocks, rows
    from paceline_deepspeed.config.parts import PARTS

    page = reference.deepspeed()
    for row in rows():
        block = row.name.partition(".")[0] if row.name.partition(".")[0] in blocks() else ""
        assert f"| `{row.name.removeprefix(f'{block}.')}` |" in page, row.name
    assert all(f"| `{part.name}` |" in page for parts in PARTS.values() for part in parts)
    widths = {line.count(" | ") for line in page.splitlines() if line.startswith("| ") and "| type |" not in line}
    assert widths <= {1, 4}


def test_every_field_of_accelerates_is_described(reference: ModuleType) -> None:
    from paceline_accelerate.engine_fields import ROWS

    page = reference.accelerate()
    assert all(f"| `{row.attribute or row.name}` |" in page for row in ROWS)
    assert "FULL_SHARD" in page and "`zero: 2`" in page and "**refused**" in page


def test_every_variable_is_described(reference: ModuleType) -> None:
    from paceline.base.env import TABLE

    page = reference.environment()
    assert all(f"| `{name}` |" in page for name in TABLE)


def test_docstrings_become_markdown(reference: ModuleType) -> None:
    doc = """First sentence.

    Args:
        first: what it is,
            in two lines.
        second, third: others.

    Ranks: all, also
        those without a sample.

    Example:
        with this:
            go()

    Source: a paper.
    """
    text = reference.prose(doc)
    assert "**Args**\n\n- `first`: what it is,\n    in two lines.\n- `second, third`: others." in text
    assert "**Ranks** all, also\nthose without a sample." in text
    assert "```python\nwith this:\n    go()\n```\n\nSource: a paper." in text


def test_signatures_are_plain(reference: ModuleType) -> None:
    def function(self, first: int | None, second: str = "text") -> list[int]:
        return []

    assert reference.signature("function", function, bound=True) == (
        "```text\nfunction(first: int | None, second: str = 'text') -> list[int]\n```"
    )
