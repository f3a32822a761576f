"""A DeepSpeed config, read: every key checked, with its place, and said in settings of ours.

    ds_config.json (hjson) or a dict  -->  DeepSpeedConfig
        values   every key by dotted name ("fp16.loss_scale"), as given or DeepSpeed's default, "auto" resolved
        places   where each that was given stands: "ds_config.json:12"
        given    the same in our words: Given("zero", 2, "code", "ds_config.json:9"), for `Accelerator(plan=...)`
        unused   keys without effect here, each with the reason
    .batch(width)  -->  Batch            the batch triangle, once the width of the run is known

The table of keys is `deepspeed_keys`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.given import Choice, Given


@dataclass(frozen=True)
class Batch:
    """The three numbers of a batch, all known: `train = micro * accumulate * width`."""

    train: int
    micro: int
    accumulate: int
    width: int


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A config that was read and checked.

    Attributes:
        source: the file's path, or "config={...}".
        values: every known key by dotted name, with DeepSpeed's default where it is not given.
        places: dotted name -> where it was given; defaults have none.
        given: what it means in our settings and options.
        unused: keys without effect, with the reason.
    """

    source: str
    values: Mapping[str, Any]
    places: Mapping[str, str] = field(default_factory=dict)
    given: tuple[Given, ...] = ()
    unused: tuple[Choice, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def batch(self, width: int) -> Batch:
        """The batch triangle for `width` ranks that read different samples.

        Raises:
            ConfigError: `deepspeed-batch`, where it does not close.
        """
        micro, accumulate = self.values["train_micro_batch_size_per_gpu"], self.values["gradient_accumulation_steps"]
        train = self.values["train_batch_size"]
        if micro is None and accumulate is None:
            accumulate = 1
        if micro is None:
            micro = train // accumulate // width
        if accumulate is None:
            accumulate = 1 if train is None else train // micro // width
        return Batch(micro * accumulate * width, micro, accumulate, width)


_DEFAULTS: dict[str, Any] = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "gradient_clipping": 1.0,
    "steps_per_print": None,
    "fp16.enabled": False,
    "bf16.enabled": False,
    "zero_optimization.stage": 0,
    "optimizer.type": None,
    "optimizer.params": {},
    "scheduler.type": None,
    "scheduler.params": {},
}


def read(config: str | Path | Mapping[str, Any]) -> DeepSpeedConfig:
    """Reads a config.

    Args:
        config: a file's path, or the dict itself.

    Raises:
        ConfigError: all problems at once.
    """
    source = "config={...}" if isinstance(config, Mapping) else str(config)
    content = config if isinstance(config, Mapping) else json.loads(Path(config).read_text(encoding="utf-8"))
    said = dict(_flat(content))
    values = {**_DEFAULTS, **said}
    given = [Given("zero", values["zero_optimization.stage"], "code", source)]
    for name in ("fp16", "bf16"):
        if values[f"{name}.enabled"]:
            given.append(Given("mixed_precision", name, "code", source))
    return DeepSpeedConfig(source, values, dict.fromkeys(said, source), tuple(given))


def _flat(content: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        if isinstance(value, Mapping) and name != "params":
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
