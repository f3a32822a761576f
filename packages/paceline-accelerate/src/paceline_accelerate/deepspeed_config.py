"""`accelerate.utils.deepspeed.HfDeepSpeedConfig`: a DeepSpeed config whose keys are read by dotted names.

transformers derives its own config classes from this one, so the methods and the attribute `config` are accelerate's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.base.errors import ConfigError
from paceline.base.parts import require

_OFFLOAD_DEVICES = ("cpu", "nvme")


class HfDeepSpeedConfig:
    """A DeepSpeed config that can be asked for its ZeRO stage, its offload and any key by its dotted name.

    Args:
        config_file_or_dict: a dict, which is copied; the path of a JSON file; or base64 of JSON.

    Attributes:
        config: the config itself, as nested dicts.

    Raises:
        ConfigError: `config-file`, `config-syntax`; `part-missing`.
    """

    def __init__(self, config_file_or_dict: Mapping[str, Any] | str | Path) -> None:
        if isinstance(config_file_or_dict, Mapping):
            self.config: dict[str, Any] = copy.deepcopy(dict(config_file_or_dict))
        elif isinstance(config_file_or_dict, str | Path):
            require("deepspeed", "the reader of DeepSpeed's configs is", "HfDeepSpeedConfig reads a file")
            from paceline_deepspeed.config.text import entries_of, plain

            _, block = entries_of(config_file_or_dict, "HfDeepSpeedConfig({})")
            self.config = plain(block)
        else:
            raise TypeError(f"a DeepSpeed config is a dict or a str, not a {type(config_file_or_dict).__name__}")
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Reads the stage and the offload anew; call it after `config` was changed."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        optimizer_device = self.get_value("zero_optimization.offload_optimizer.device")
        param_device = self.get_value("zero_optimization.offload_param.device")
        names_device = optimizer_device in _OFFLOAD_DEVICES or param_device in _OFFLOAD_DEVICES
        # ZeRO offloads at stages 2 and 3 only.
        self._offload = names_device and (self.is_zero2() or self.is_zero3())

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Returns the block that has a key (None if there is no such block), and the last part of the key's name."""
        *blocks, key = ds_key_long.split(".")
        block: Any = self.config
        for name in blocks:
            block = block.get(name)
            if block is None:
                return None, key
        return block, key

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Returns the value of a key; `default` if it is not given."""
        block, key = self.find_config_node(ds_key_long)
        return default if block is None else block.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Removes a key or a block.

        Raises:
            ConfigError: `config-key`, if it does not exist although `must_exist` is set.
        """
        block, key = self.find_config_node(ds_key_long)
        if block is not None and key in block:
            del block[key]
        elif must_exist:
            text = json.dumps(self.config, default=str)
            what = f"the DeepSpeed config has no entry {ds_key_long}."
            raise ConfigError("config-key", what, why=f"it is {text}", fix="leave must_exist out, or check the name")

    def is_true(self, ds_key_long: str) -> bool:
        """Whether a key is given and true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Whether a key is given and false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Whether the stage is 2."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Whether the stage is 3."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Whether optimizer states or parameters are kept in the host's memory or on NVMe."""
        return self._offload


def without_auto(block: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config without the keys that are still "auto"; DeepSpeed's defaults apply to them then."""
    resolved: dict[str, Any] = {}
    for name, value in block.items():
        if isinstance(value, Mapping):
            resolved[name] = without_auto(value)
        elif value != "auto":
            resolved[name] = value
    return resolved
