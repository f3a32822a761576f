"""The text of a DeepSpeed config: JSON, or JSON as people write it (hjson), as pairs that know their lines.

Python's own parser reads what is plain JSON. The rest goes to hjson: comments, trailing commas, keys without quotes, one
key on each line without commas, a text without the outer braces. Pairs stay pairs, so that a key that stands twice is seen.
"""

from __future__ import annotations

import base64
import binascii
import bisect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.base.errors import ConfigError, cut
from paceline.base.files import expanded
from paceline.config import limits


class Pairs(list[tuple[str, Any]]):
    """A block as the parser leaves it: keys and values in the order of the text, a key that stands twice included."""


@dataclass(frozen=True)
class JsonEntry:
    """One key.

    Attributes:
        name: of the key alone.
        value: a single value, a list or a block.
        where: its place: "ds_config.json:12", or "deepspeed.initialize(config={'fp16': ...})".
    """

    name: str
    value: Any
    where: str


class JsonBlock(list[JsonEntry]):
    """The keys of a block, in order, each with its place."""


_FORM = 'write `{"key": value, ...}`: every bracket and quote closed, a colon after each key'
# What stands before a colon. Each alternative begins where nothing of its own kind ends, so that a search is linear.
_KEY = re.compile(
    r"""(?P<mark>["'])(?P<quoted>(?:\\.|(?!(?P=mark))[^\\\n])*)(?P=mark)\s*:|(?<![^\s"'{}\[\],:])(?P<plain>[^\s"'{}\[\],:]+)\s*:"""
)
_COLON = re.compile(r"\s*:")
_TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*|//[^\n]*|/\*.*?\*/', re.DOTALL)


def entries_of(config: str | Path | Mapping[str, Any], code: str) -> tuple[str, JsonBlock]:
    """Returns the source of a config, and its keys.

    Args:
        config: a file's path, base64 of JSON, or the dict itself.
        code: what stands around a dict in its places, such as "deepspeed.initialize(config={})" with {} for the dict.

    Raises:
        ConfigError: `config-file`, `config-syntax`, `config-size`.
    """
    if isinstance(config, Mapping):
        _check_size(config, code.replace("{}", "{...}"))
        return code.replace("{}", "{...}"), _of_dict(config, code)
    text, source = _text(config)
    pairs = _parse(text, source)
    _check_size(pairs, source)
    return source, _with_lines(text, pairs, source)


def _check_size(value: object, name: str) -> None:
    """Refuses nested mappings and lists that are larger than a config may be, or that contain themselves.

    Raises:
        ConfigError: `config-size`.
    """
    # This walk needs no recursion, and it ends even if a mapping contains itself: the depth or the count reaches its limit.
    values = 0
    pending = [(value, 1)]
    while pending:
        current, depth = pending.pop()
        values += 1
        limits.check(values, depth if isinstance(current, Mapping | list | tuple) else 0, name)
        if isinstance(current, Mapping):
            # The length is checked before the children are added, so that a huge mapping is refused without a walk over it.
            limits.check(values + 2 * len(current), 0, name)
            values += len(current)
            pending += [(child, depth + 1) for child in current.values()]
        elif isinstance(current, list | tuple):
            limits.check(values + len(current), 0, name)
            pending += [(child, depth + 1) for child in current]


def plain(value: object) -> Any:
    """Returns a value with dicts in place of blocks and pairs; of equal keys the last one counts."""
    if isinstance(value, Pairs):
        return {name: plain(item) for name, item in value}
    if isinstance(value, JsonBlock):
        return {item.name: plain(item.value) for item in value}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def _of_dict(block: Mapping[Any, Any], code: str, *above: str) -> JsonBlock:
    """Lists the keys of a dict with their places in it; `above` are the names of the blocks around them."""
    entries = JsonBlock()
    for key, value in block.items():
        path = (*above, str(key))
        if not above and "." in path[-1]:
            # DeepSpeed ignores such a key. trl's `prepare_deepspeed` adds "zero_optimization.stage3_prefetch_bucket_size" and
            # two others, beside keys of the block that say otherwise, and with a value that is no whole number.
            continue
        inside = _of_dict(value, code, *path) if isinstance(value, Mapping) else value
        shown = "..."
        for name in reversed(path):
            shown = f"{{{name!r}: {shown}}}"
        entries.append(JsonEntry(path[-1], inside, code.replace("{}", shown)))
    return entries


def _text(config: str | Path) -> tuple[str, str]:
    """Returns the text of a config and its source: the file of this name, else the decoded base64."""
    path = expanded(config)
    try:
        if path.is_file():
            return limits.read_text(path, str(config)), str(config)
        reason = "there is no such file"
    except ConfigError:
        raise
    except OSError as error:
        reason = error.strerror or "it is not UTF-8 text"
    except ValueError:  # a text with null bytes is no path; UnicodeDecodeError is one too
        reason = "it is not UTF-8 text"
    try:
        return base64.urlsafe_b64decode(str(config)).decode("utf-8"), "config (base64)"
    except (binascii.Error, ValueError):
        why = [reason] if str(config).endswith(".json") else [reason, "it is no base64 of JSON either"]
        raise ConfigError(
            "config-file",
            f"the DeepSpeed config {cut(str(config), 200)} is no string path to an existing deepspeed config.",
            why,
            "name a file of JSON that exists, or hand over the dict itself",
        ) from None


def _parse(text: str, source: str) -> Pairs:
    """Parses JSON strictly and, if that fails, as hjson."""
    try:
        parsed = json.loads(text, object_pairs_hook=Pairs)
    except (ValueError, RecursionError) as error:
        parsed = _parse_loosely(text, source, error)
    if not isinstance(parsed, Pairs):
        what = f"{source}:1:1: a config is a block of keys, and this is {_kind(parsed)}."
        raise ConfigError("config-syntax", what, "", _FORM)
    return parsed


def _parse_loosely(text: str, source: str, strict: Exception) -> Any:
    """Parses hjson.

    Args:
        text: the config.
        source: names it in errors.
        strict: the error of the strict parser, which often shows the place of the mistake better.

    Raises:
        ConfigError: `config-syntax`.
    """
    import hjson

    try:
        return hjson.loads(text, object_pairs_hook=Pairs)
    except (ValueError, RecursionError) as error:
        # A RecursionError knows no place.
        line = getattr(error, "lineno", 1)
        column = getattr(error, "colno", 1)
        position = getattr(error, "pos", 0)
        # hjson leaves the mark of the character at fault in some messages.
        message = str(getattr(error, "msg", error)).replace("%r", repr(text[position : position + 1]))
        # hjson reports a text that ends inside a block as a key without a name.
        cut_off = "the text ends before its last block is closed: a `}` or `]` is missing"
        why = [cut_off if message.endswith("(eof)") else _in_a_sentence(message)]
        if isinstance(strict, json.JSONDecodeError) and (strict.lineno, strict.colno) != (line, column):
            why.append(f"strict JSON ends at line {strict.lineno}, column {strict.colno}: {_in_a_sentence(strict.msg)}")
        what = f"{source}:{line}:{column} (line {line}, column {column}) is not JSON."
        raise ConfigError("config-syntax", what, why, _FORM) from None


def _in_a_sentence(message: str) -> str:
    """Returns a message without its capital letter."""
    return message[:1].lower() + message[1:]


def _with_lines(text: str, pairs: Pairs, source: str) -> JsonBlock:
    """Finds the line of each key: parsers keep the order of the text, so each search starts where the last one ended."""
    places: dict[str, list[int]] = {}
    for match in _KEY.finditer(_bare(text)):
        name = match["quoted"] if match["plain"] is None else match["plain"]
        places.setdefault(name, []).append(match.start())
    line_ends = [match.start() for match in re.finditer("\n", text)]
    position = -1

    def entries_of_block(block: Pairs) -> JsonBlock:
        nonlocal position
        entries = JsonBlock()
        for name, value in block:
            candidates = places.get(name, [])
            following = bisect.bisect_right(candidates, position)
            if following < len(candidates):
                position = candidates[following]
            where = f"{source}:{bisect.bisect_left(line_ends, position) + 1}"
            inside = entries_of_block(value) if isinstance(value, Pairs) else plain(value)
            entries.append(JsonEntry(name, inside, where))
        return entries

    return entries_of_block(pairs)


def _bare(text: str) -> str:
    """Blanks comments and quoted values of a text, so that what is left before a colon is a key."""

    def blank(match: re.Match[str]) -> str:
        is_key = match[0][0] in "\"'" and _COLON.match(text, match.end())
        return match[0] if is_key else re.sub(r"[^\n]", " ", match[0])

    return _TOKENS.sub(blank, text)


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a list"
    return "a single value" if value else "empty"
