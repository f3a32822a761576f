"""Options of strategies, as they are given: read one by one, each with its own source and place, and merged by name.

    options:                      --option shard.reshard=no        PACELINE_OPTIONS='{shard: {reshard: no}}'
      shard:                      Accelerator(options={"shard": {"reshard": False}})
        reshard: no
                        all become    Given("options.shard.reshard", "no", source, where)

A single value stays text, as it does for settings, and the strategy reads it; a list or a mapping is read as YAML.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.base.errors import ConfigError, Problem, short_repr
from paceline.config import limits
from paceline.config.given import SOURCES, Choice, Given

if TYPE_CHECKING:
    import yaml

NAME = "options"
_FORM = "STRATEGY.OPTION=VALUE, such as shard.reshard=no"
_BLOCK = "a block of strategies, each with a block of its options, such as {shard: {reshard: no}}"


def read(given: Given) -> Iterator[Given | Problem]:
    """The options in one value of the setting `options`.

    Args:
        given: from a flag: `strategy.option=value`; from a variable: YAML (or JSON) text; from code: a mapping.
    """
    if isinstance(given.value, str):
        yield from _flag(given) if given.source == "command line" else _text(given)
    elif isinstance(given.value, Mapping):
        for strategy, values in given.value.items():
            if not isinstance(values, Mapping):
                yield _wrong(f"{NAME}.{strategy}", replace(given, value=values), "a mapping of its options")
                continue
            for option, value in values.items():
                yield Given(f"{NAME}.{strategy}.{option}", value, given.source, given.where)
    else:
        yield _wrong(NAME, given, "a mapping of strategies, each with a mapping of its options")


def read_node(node: yaml.Node, source: str, file: str) -> Iterator[Given | Problem]:
    """The options in a YAML block.

    Args:
        node: the block.
        source: one of `SOURCES`.
        file: the file, whose name stands in each place with the line; or the whole place, where it ends in a colon.
    """
    if is_null(node):
        return
    where = _place(node, file)
    if not _is_block(node):
        yield _wrong(NAME, Given(NAME, _shown(node), source, where), _BLOCK)
        return
    first: dict[str, str] = {}
    for strategy, block in node.value:
        if is_null(block):
            continue
        if not _is_block(block):
            name = f"{NAME}.{strategy.value}"
            yield _wrong(name, Given(name, _shown(block), source, _place(strategy, file)), "a block of its options")
            continue
        for option, value in block.value:
            name, where = f"{NAME}.{strategy.value}.{option.value}", _place(option, file)
            if name in first:
                what = f"{where} sets {name} a second time."
                yield Problem("config-twice", what, f"first: {first[name]}", "keep one of the two")
            elif not is_null(value):
                yield Given(name, value_of(value), source, where)
            first[name] = where


def merge(given: Iterable[Given]) -> tuple[dict[str, dict[str, Any]], tuple[Choice, ...]]:
    """Takes for each option the value of the strongest source, and says which one that was."""
    choices: dict[str, Choice] = {}
    own = [value for value in given if value.name.startswith(f"{NAME}.")]
    for value in sorted(own, key=lambda given_option: SOURCES.index(given_option.source)):
        before = choices.get(value.name)
        instead = f"instead of {before.value} ({before.where})" if before else ""
        choices[value.name] = Choice(value.name, value.value, value.source, value.where, instead)
    merged: dict[str, dict[str, Any]] = {}
    for name, choice in choices.items():
        _, strategy, option = name.split(".", 2)
        merged.setdefault(strategy, {})[option] = choice.value
    return merged, tuple(choices.values())


def value_of(node: yaml.Node) -> Any:
    """The text of a single value; a list or a mapping as YAML has it.

    Raises:
        ValueError: for a mapping that Python cannot hold.
    """
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return node.value
    try:
        return yaml.SafeLoader("").construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error).split("\n")[0]) from None


def is_null(node: yaml.Node) -> bool:
    """Whether nothing stands there."""
    return str(node.tag) == "tag:yaml.org,2002:null"


def _flag(given: Given) -> Iterator[Given | Problem]:
    name, equals, text = given.value.partition("=")
    strategy, _, option = name.strip().partition(".")
    if not (equals and strategy and option):
        yield _wrong("an option", given, _FORM)
        return
    node = _compose(text)
    if isinstance(node, Problem | None):
        yield node or _wrong(name, given, "a value after the =")
        return
    yield Given(f"{NAME}.{strategy}.{option}", value_of(node), given.source, given.where)


def _text(given: Given) -> Iterator[Given | Problem]:
    node = _compose(given.value)
    if isinstance(node, Problem):
        yield node
    elif node is not None:
        yield from read_node(node, given.source, f"{given.where}:")


def _compose(text: str) -> Any:
    """The YAML node of a text; None for an empty one; a problem for what is no YAML."""
    import yaml

    try:
        return limits.compose(text, short_repr(text))
    except ConfigError as error:
        return error.problems[0]
    except (yaml.YAMLError, ValueError) as error:
        what = getattr(error, "problem", None) or str(error).split("\n")[0]
        return Problem("config-syntax", f"{short_repr(text)} is not YAML.", str(what), "close every bracket and quote")


def _is_block(node: yaml.Node) -> bool:
    import yaml

    return isinstance(node, yaml.MappingNode)


def _shown(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node.value, str) else "a list"


def _place(node: yaml.Node, file: str) -> str:
    return file.rstrip(":") if file.endswith(":") else f"{file}:{node.start_mark.line + 1}"


def _wrong(name: str, given: Given, expected: str) -> Problem:
    fix = "write it so, or leave it out"
    if given.source == "command line":
        fix = f"write it as {_FORM}"
    what = f"{name} cannot be {short_repr(given.value)}."
    return Problem("config-value", what, f"it comes from {given.where}; expected: {expected}", fix)
