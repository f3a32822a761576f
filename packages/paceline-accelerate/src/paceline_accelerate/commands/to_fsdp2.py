"""`accelerate to-fsdp2`: rewrites a config file that was made for version 1 of FSDP with the keys of version 2."""

from __future__ import annotations

import argparse
import enum
import logging
from pathlib import Path
from typing import Any

import yaml

from paceline_accelerate.commands.arguments import parser_for

_log = logging.getLogger(__name__)


class ConversionStatus(enum.Enum):
    """The reason why version 2 has no such key."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


_UNCHANGED = """fsdp_version fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_cpu_ram_efficient_loading fsdp_offload_params
    fsdp_state_dict_type fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params fsdp_activation_checkpointing"""
_REMOVED = "fsdp_backward_prefetch fsdp_sync_module_states fsdp_use_orig_params"
# Key of version 1 -> the one of version 2, or why there is none.
ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    **{name: name for name in _UNCHANGED.split()},
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_forward_prefetch": ConversionStatus.NOT_YET_IMPLEMENTED,
    **dict.fromkeys(_REMOVED.split(), ConversionStatus.REMOVED),
}
# Whether parameters are divided again after the forward pass.
_RESHARDS = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
ARGUMENT_VALUE_MAPPING = {"fsdp_sharding_strategy": _RESHARDS, "fsdp_reshard_after_forward": _RESHARDS}


def load_config(config_file: str) -> dict[str, Any]:
    """Reads a YAML config.

    Raises:
        ValueError: it holds no settings.
    """
    config = yaml.safe_load(Path(config_file).read_text(encoding="utf-8"))
    if not config:
        raise ValueError("Config file is empty")
    return dict(config)


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrites the block `fsdp_config` of a config with the keys of version 2, in place."""
    block: dict[str, Any] = config.get("fsdp_config", {})
    if not block:
        _log.info("The config has no `fsdp_config`: nothing is converted.")
        return config
    if block.get("fsdp_version", 1) == 2:
        _log.warning("The config is for version 2 of FSDP already: nothing is converted.")
        return config
    converted: dict[str, Any] = {}
    for key, value in block.items():
        new_key = ARGUMENT_KEY_MAPPING.get(key, key)
        if isinstance(new_key, ConversionStatus):
            why = "has been removed in" if new_key is ConversionStatus.REMOVED else "is not yet implemented in"
            _log.warning("Argument %s %s FSDP2, skipping this key...", key, why)
            continue
        # Only keys with new values are looked up: the value of another key may be a list, which no dict has as a key.
        if key in ARGUMENT_VALUE_MAPPING:
            value = ARGUMENT_VALUE_MAPPING[key].get(value, value)
        converted[new_key] = value
    converted["fsdp_version"] = 2
    config["fsdp_config"] = converted
    return config


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Returns the parser of `accelerate to-fsdp2`."""
    description = "Converts an accelerate config from version 1 of FSDP to version 2."
    parser = parser_for("to-fsdp2", "", to_fsdp2_command, subparsers, description=description)
    add = parser.add_argument
    add("--config_file", type=str, required=True, help="the config file")
    add("--overwrite", action="store_true", default=False, help="write into a file that exists")
    add("--output_file", type=str, default=None, help="the file to write [the config file, with --overwrite]")
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Converts a file.

    Raises:
        FileNotFoundError: there is no config file.
        ValueError: the output file is not named.
        FileExistsError: it exists already.
    """
    path = Path(args.config_file)
    if not path.exists():
        raise FileNotFoundError(f"Config file {path} not found: it does not exist.")
    if not args.overwrite and args.output_file is None:
        raise ValueError("If --overwrite is not set, --output_file must be provided")
    if not args.overwrite and Path(args.output_file).exists():
        raise FileExistsError(f"Output file {args.output_file} already exists and --overwrite is not set")
    config = convert_config_to_fsdp2(load_config(args.config_file))
    Path(args.output_file or path).write_text(yaml.safe_dump(config), encoding="utf-8")
