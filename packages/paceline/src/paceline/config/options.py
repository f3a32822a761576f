"""Reads the options of strategies one by one, each with its own source and place, and merges them by name.

    options:                      --option shard.reshard=no        PACELINE_OPTIONS='{shard: {reshard: no}}'
      shard:                      Accelerator(options={"shard": {"reshard": False}})
        reshard: no
                        all become    Given("options.shard.reshard", "no", source, where)

A single value stays text, as it does for settings, and the strategy parses it. A list or a mapping is parsed as YAML.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.base.errors import ConfigError, Problem, short_repr
from paceline.config.given import Choice, Given

if TYPE_CHECKING:
    import yaml

NAME = "options"
_FORM = "STRATEGY.OPTION=VALUE, such as shard.reshard=no"
_BLOCK = "a block of strategies, each with a block of its options, such as {shard: {reshard: no}}"


def read(given: Given) -> Iterator[Given | Problem]:
    """Yields the options in one value of the setting `options`, and a problem for each part that is not an option.

    Args:
        given: the value. It is `strategy.option=value` from a flag, YAML (or JSON) text from a variable, and a mapping
            from code.
    """
    if isinstance(given.value, str):
        if given.source == "command line":
            yield from _flag(given)
        else:
            yield from _text(given)
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
    """Yields the options in a YAML block, and a problem for each part that is not an option.

    Args:
        node: the block.
        source: one of `SOURCES`.
        file: name of the file; the place of each option is this name and its line. If the text ends in a colon, it is
            not a file but the place itself, such as `PACELINE_OPTIONS:`, and gets no line.
    """
    if is_null(node):
        return
    where = _place(node, file)
    if not _is_block(node):
        yield _wrong(NAME, Given(NAME, _shown(node), source, where), _BLOCK)
        return
    first_places: dict[str, str] = {}
    for strategy, block in node.value:
        if is_null(block):
            continue
        if not _is_block(block):
            name = f"{NAME}.{strategy.value}"
            yield _wrong(name, Given(name, _shown(block), source, _place(strategy, file)), "a block of its options")
            continue
        for option, value in block.value:
            name = f"{NAME}.{strategy.value}.{option.value}"
            where = _place(option, file)
            if name in first_places:
                what = f"{where} sets {name} a second time."
                yield Problem("config-twice", what, f"first: {first_places[name]}", "keep one of the two")
            elif not is_null(value):
                yield Given(name, value_of(value), source, where)
            first_places[name] = where


def merge(given: Iterable[Given]) -> tuple[dict[str, dict[str, Any]], tuple[Choice, ...]]:
    """Takes for each option the value of the strongest source.

    Returns:
        The values as {strategy: {option: value}}, and one row for each option with its source.
    """
    choices: dict[str, Choice] = {}
    own = [value for value in given if value.name.startswith(f"{NAME}.")]
    # The weakest source comes first, and each later value replaces the one before it.
    for value in sorted(own, key=lambda given_option: given_option.strength):
        weaker = choices.get(value.name)
        instead = f"instead of {weaker.value} ({weaker.where})" if weaker else ""
        choices[value.name] = Choice(value.name, value.value, value.source, value.where, instead)
    merged: dict[str, dict[str, Any]] = {}
    for name, choice in choices.items():
        _, strategy, option = name.split(".", 2)
        merged.setdefault(strategy, {})[option] = choice.value
    return merged, tuple(choices.values())


def value_of(node: yaml.Node) -> Any:
    """Returns the text of a single value, or the list or mapping that a YAML node stands for.

    Raises:
        ValueError: a key of the mapping cannot be a key of a Python dict.
    """
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return node.value
    try:
        return yaml.SafeLoader("").construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error).split("\n")[0]) from None


def is_null(node: yaml.Node) -> bool:
    """Returns whether a node is empty or YAML's null."""
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
    """Returns the YAML node of a text; None for an empty text; a problem for a text that is not YAML."""
    import yaml

    try:
        from paceline.config import limits  # only text is parsed

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
    if file.endswith(":"):
        return file.rstrip(":")
    return f"{file}:{node.start_mark.line + 1}"


def _wrong(name: str, given: Given, expected: str) -> Problem:
    fix = "write it so, or leave it out"
    if given.source == "command line":
        fix = f"write it as {_FORM}"
    what = f"{name} cannot be {short_repr(given.value)}."
    return Problem("config-value", what, f"it comes from {given.where}; expected: {expected}", fix)
