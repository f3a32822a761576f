"""A DeepSpeed config, read: every key checked, with its place, and said in settings of ours.

    ds_config.json (JSON or hjson), base64 of it, or a dict  -->  DeepSpeedConfig
        values   every key by dotted name ("fp16.loss_scale"), as given or DeepSpeed's default, "auto" resolved
        places   where each that was given stands: "ds_config.json:12"
        given    the same in our words: Given("zero", 2, "code", "ds_config.json:9"), for `Accelerator(plan=...)`
        unused   keys without effect here, each with the reason
    .batch(width)  -->  Batch            the batch triangle, once the width of the run is known

    the file's text  --`text`-->  keys with places  --`values`-->  values  --`meaning`-->  settings

The table of keys is `keys`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.base.errors import ConfigError
from paceline.config.given import Choice, Given
from paceline_deepspeed.config.batch import MICRO, STEPS, TRAIN, closed
from paceline_deepspeed.config.batch import Batch as Batch
from paceline_deepspeed.config.keys import by_name
from paceline_deepspeed.config.meaning import meaning_of
from paceline_deepspeed.config.row import NOTHING
from paceline_deepspeed.config.text import JsonBlock, entries_of
from paceline_deepspeed.config.values import values_of


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A config that was read and checked.

    Attributes:
        source: the file's path, or "deepspeed.initialize(config={...})".
        values: every known key by dotted name, with DeepSpeed's default where it is not given.
        places: dotted name -> where it was given; defaults have none.
        given: what it means in our settings and options.
        unused: keys without effect, with the reason.
        kept: keys that were given and are read as they are, by the engine or who else the table says.
    """

    source: str
    values: Mapping[str, Any]
    places: Mapping[str, str] = field(default_factory=dict)
    given: tuple[Given, ...] = ()
    unused: tuple[Choice, ...] = ()
    kept: tuple[Choice, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """Returns a value by dotted name, or a whole block: `config["fp16"]["enabled"]` is `config["fp16.enabled"]`."""
        if name in self.values:
            return self.values[name]
        prefix = f"{name}."
        block: dict[str, Any] = {}
        for key, value in self.values.items():
            if key.startswith(prefix):
                block[key.removeprefix(prefix)] = value
        if not block:
            raise KeyError(name)
        places: dict[str, str] = {}
        for key, place in self.places.items():
            if key.startswith(prefix):
                places[key.removeprefix(prefix)] = place
        return DeepSpeedConfig(self.source, block, places)

    def get(self, name: str, default: object = None) -> Any:
        """Returns a value or a block by dotted name, or a default, as a dict does."""
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: object) -> bool:
        """Whether a key or a block was given: what has its default only is not there, as in the dict of a script."""
        return any(place == name or place.startswith(f"{name}.") for place in self.places)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        """Names at the top level that were given, in their order."""
        return list(dict.fromkeys(place.partition(".")[0] for place in self.places))

    def batch(self, width: int) -> Batch:
        """Completes the batch triangle for `width` ranks that read different samples.

        Raises:
            ConfigError: `deepspeed-batch`, where it does not close.
        """
        numbers = {name: self.values[name] for name in (TRAIN, MICRO, STEPS)}
        return closed(numbers, self.places, width)

    @property
    def notices(self) -> tuple[str, ...]:
        """One sentence on the given keys without effect, or none; values that DeepSpeed has by default are left out."""
        return self.notices_beside({})

    def notices_beside(self, usual: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the notices without those of values that nobody has chosen: `usual` has them by dotted name."""
        texts = []
        for row in self.unused:
            known = by_name().get(row.field)  # none for a script's own key
            default = None if known is None else known.default
            is_usual = row.value in (default, usual.get(row.field, default))
            if NOTHING not in row.reason and not is_usual:
                texts.append(f"{row.field} ({row.where}): {row.reason.removeprefix('no effect here: ')}")
        return (f"no effect here: {'; '.join(texts)}.",) if texts else ()


def read(
    config: str | Path | Mapping[str, Any],
    *,
    hints: Mapping[str, Any] | None = None,
    code: str = "deepspeed.initialize(config={})",
) -> DeepSpeedConfig:
    """Reads a config.

    Args:
        config: a file's path, base64 of JSON, or the dict itself.
        hints: what "auto" stands for, by dotted name of a key or by TrainingArguments' name of it.
        code: what the places of a dict look like, with {} for it.

    Raises:
        ConfigError: `config-file`, `config-syntax`; then `config-key`, `config-value`, `config-twice`, `deepspeed-auto`,
            `deepspeed-conflict`, `deepspeed-feature`: all problems at once.
    """
    source, block = entries_of(config, code)
    return read_block(source, block, hints or {})


def read_block(source: str, block: JsonBlock, hints: Mapping[str, Any]) -> DeepSpeedConfig:
    """Reads a config whose keys were already found in their file or dict."""
    values = values_of(block, hints)
    meaning = meaning_of(values)
    problems = [*values.problems, *meaning.problems]
    if problems:
        raise ConfigError.of(problems)
    return DeepSpeedConfig(
        source,
        values.values,
        values.places,
        given=tuple(meaning.given),
        unused=tuple(meaning.unused),
        kept=tuple(meaning.kept),
    )
