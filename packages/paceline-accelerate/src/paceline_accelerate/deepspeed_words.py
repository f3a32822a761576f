"""Translates accelerate's fields for DeepSpeed into a DeepSpeed config, and that into Paceline's settings.

zero_stage: 2, offload_optimizer_device: cpu       -> {"zero_optimization": {"stage": 2, "offload_optimizer": ...}}
deepspeed_config_file: ds.json (hf_ds_config=...)  -> that config; the other fields are the values of its keys that are "auto"

The fields are those of `DeepSpeedPlugin`, of flags and of the block `deepspeed_config:` in accelerate's files. `dialect` and
`deepspeed_plugin` call this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.base.env import parse_bool
from paceline.base.errors import Problem, short_repr
from paceline.base.parts import require
from paceline.config.dialects import HANDED_ON, Translation
from paceline.config.given import Choice, Given, nearest

# The modules with DeepSpeed's keys are imported only for a run that asks for DeepSpeed, because few do.
if TYPE_CHECKING:
    from paceline_deepspeed.config import DeepSpeedConfig
    from paceline_deepspeed.config.text import JsonBlock

# Fields that name a DeepSpeed config, in accelerate's file and in the plugin.
FILES = ("deepspeed_config_file", "hf_ds_config")
_LAUNCHED = "`paceline launch --nodes`, or --hostfile, says where a run takes place"
_UNITS = "units are found by themselves"
_MSAMP = "MS-AMP is not carried: `mixed_precision: fp8` multiplies in float8 by torchao"


@dataclass(frozen=True)
class PluginField:
    """A field of accelerate's for DeepSpeed.

    Attributes:
        name: as a flag of `accelerate launch`, and in a file.
        key: dotted name of DeepSpeed's key.
        variable: accelerate's, which the launcher sets, and which a plugin that a script makes reads.
        takes: whether a value follows the flag; None for what is no flag.
        idle: why it has no effect.
        attribute: name in the plugin, where that is another.
        parse: reads the text of the variable, for a field that a plugin fills; None for others.
        default: of such a field, if neither the script nor the variable gives a value.
    """

    name: str
    key: str = ""
    variable: str = ""
    takes: bool | None = None
    idle: str = ""
    attribute: str = ""
    parse: Callable[[str], Any] | None = None
    default: Any = None


def _zero(name: str, key: str, parse: Callable[[str], Any] = str, default: Any = "none") -> PluginField:
    variable = f"ACCELERATE_DEEPSPEED_{name.upper()}"
    return PluginField(name, f"zero_optimization.{key}", variable, takes=True, parse=parse, default=default)


ROWS = (
    PluginField("use_deepspeed", variable="ACCELERATE_USE_DEEPSPEED", takes=False),
    _zero("zero_stage", "stage", int, 2),
    PluginField("gradient_accumulation_steps", "gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
                parse=int, default="auto"),
    PluginField("gradient_clipping", "gradient_clipping", "ACCELERATE_GRADIENT_CLIPPING", parse=float, default="auto"),
    _zero("offload_optimizer_device", "offload_optimizer.device"),
    _zero("offload_param_device", "offload_param.device"),
    _zero("offload_optimizer_nvme_path", "offload_optimizer.nvme_path"),
    _zero("offload_param_nvme_path", "offload_param.nvme_path"),
    PluginField("zero3_init_flag", variable="ACCELERATE_DEEPSPEED_ZERO3_INIT", takes=True),
    _zero("zero3_save_16bit_model", "stage3_gather_16bit_weights_on_model_save", parse_bool, False),
    PluginField("deepspeed_config_file", variable="ACCELERATE_DEEPSPEED_CONFIG_FILE", takes=True, attribute="hf_ds_config",
                parse=str),
    PluginField("deepspeed_multinode_launcher", takes=True, idle=_LAUNCHED),
    PluginField("deepspeed_moe_layer_cls_names", variable="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", takes=True, idle=_UNITS,
                attribute="transformer_moe_cls_names", parse=str),
    PluginField("deepspeed_hostfile", idle=_LAUNCHED),
    PluginField("deepspeed_exclusion_filter", idle=_LAUNCHED),
    PluginField("deepspeed_inclusion_filter", idle=_LAUNCHED),
    PluginField("is_train_batch_min", idle="loaders keep the batch size that the script gives them"),
    PluginField("enable_msamp", idle=_MSAMP, parse=parse_bool, default=False),
    PluginField("msamp_opt_level", idle=_MSAMP, parse=str, default="O1"),
)  # fmt: skip
FIELDS = {row.name: row.key for row in ROWS if row.key}
IDLE = {name: row.idle for row in ROWS for name in (row.name, row.attribute) if name and row.idle}
VARIABLES = {row.name: row.variable for row in ROWS if row.variable}
FLAGS = {row.name: row.takes for row in ROWS if row.takes is not None}
# Values of fields without effect that the files of `accelerate config` and trl have by default.
USUAL = {"deepspeed_multinode_launcher": "standard"}


def from_flags(flags: Sequence[Given]) -> Translation:
    """Reads the flags, where one of them asks for DeepSpeed.

    Raises:
        ConfigError: as `deepspeed.read`.
    """
    # The others count only together with one of these: alone they must not divide a model.
    asks = {"use_deepspeed", "zero_stage", "deepspeed_config_file"}
    accumulation = [_accumulation(flag) for flag in flags if flag.name == "accumulate"]
    if not any(flag.name in asks for flag in flags):
        # A file may ask for DeepSpeed, with another number.
        return Translation(unused=accumulation)
    fields, consumed, place = _fields_of(flags)
    translation = said_by(fields, "command line", place)
    translation.unused += _handed_on(fields, "command line", place) + accumulation
    translation.consumed = consumed
    return translation


def _fields_of(flags: Sequence[Given]) -> tuple[list[Given], set[str], str]:
    """Returns the fields that flags give, the names of all flags for DeepSpeed, and the place of the first of these."""
    own_flags: list[Given] = []
    fields: list[Given] = []
    for flag in flags:
        if flag.name not in FLAGS and flag.name != "gradient_clipping":
            continue
        own_flags.append(flag)
        # This flag asks for DeepSpeed, and is no field of its own.
        if flag.name == "use_deepspeed":
            continue
        text = str(flag.value)
        value = text if flag.name in FILES else _as_in_file(text)
        fields.append(replace(flag, value=value))
    names = {flag.name for flag in own_flags}
    place = own_flags[0].where if own_flags else ""
    return fields, names, place


def from_file(keys: Mapping[str, Given], flags: Sequence[Given]) -> Translation:
    """Reads the block `deepspeed_config:` of a file, where `distributed_type` asks for it, and flags in place of its fields.

    Raises:
        ConfigError: as `deepspeed.read`.
    """
    distributed_type = keys.get("distributed_type")
    if distributed_type is None or str(distributed_type.value).upper() != "DEEPSPEED":
        return Translation()
    block = keys.get("deepspeed_config")
    fields = block.value if block is not None and isinstance(block.value, list) else []
    flag_fields, consumed, place = _fields_of(flags)
    # A flag replaces the field of its name, as in accelerate; the other fields of the file still count.
    replaced = {field.name for field in flag_fields}
    file_fields = [field for field in fields if field.name not in replaced]
    translation = said_by([*file_fields, *flag_fields], "file", distributed_type.where)
    flag_places = {field.where for field in flag_fields}
    given: list[Given] = []
    for setting in translation.given:
        source = "command line" if setting.where in flag_places else "file"
        given.append(replace(setting, source=source))
    translation.given = given
    translation.unused += _handed_on(file_fields, "file", distributed_type.where)
    if consumed:
        translation.unused += _handed_on(flag_fields, "command line", place)
    translation.consumed = {"deepspeed_config", *consumed}
    return translation


def said_by(fields: Iterable[Given], source: str, place: str) -> Translation:
    """Reads fields of the plugin or of the block.

    Args:
        fields: each with its place; those that are None say nothing.
        source: of the settings in the result: "file", "code" or "command line".
        place: where DeepSpeed is asked for; without a config and a stage it is stage 2, accelerate's default.

    Raises:
        ConfigError: as `deepspeed.read`.
    """
    translation = Translation()
    file: Given | None = None
    said: dict[str, Given] = {}
    for field in fields:
        name = field.name
        if field.value is None:
            continue
        if name in FILES:
            # accelerate's word for "no file"; `accelerate config` writes it for an empty answer.
            if field.value != "none":
                file = field
        elif name in FIELDS:
            said[name] = field
        elif name == "zero3_init_flag":
            # transformers asks the plugin for it; Paceline has no such setting.
            continue
        elif name in IDLE:
            translation.unused.append(Choice(name, field.value, source, field.where, f"no effect here: {IDLE[name]}"))
        else:
            close = nearest(name, [*FIELDS, *FILES, *IDLE, "zero3_init_flag"])
            what = f"{field.where}: accelerate's DeepSpeed has no field {short_repr(name)}."
            fix = f"write {close!r}" if close else "leave it out"
            translation.problems.append(Problem("config-key", what, "", fix))
    if file is None and "zero_stage" not in said:
        said["zero_stage"] = Given("zero_stage", 2, source, place)
    config = _config(file, said)
    translation.given += [replace(value, source=source) for value in config.given]
    steps = config["gradient_accumulation_steps"]
    if steps is not None:
        translation.given.append(Given("accumulate", steps, source, config.places["gradient_accumulation_steps"]))
    translation.unused += config.unused
    return translation


def _handed_on(fields: Iterable[Given], source: str, place: str) -> list[Choice]:
    """Returns the fields that a plugin of the script reads from variables, with a reason that says so."""
    rows = [Choice("use_deepspeed", "true", source, place, f"{HANDED_ON}{VARIABLES['use_deepspeed']}")]
    for given in fields:
        if given.value is not None and given.name in VARIABLES:
            rows.append(Choice(given.name, given.value, source, given.where, f"{HANDED_ON}{VARIABLES[given.name]}"))
    return rows


def _accumulation(flag: Given) -> Choice:
    name = "gradient_accumulation_steps"
    return Choice(name, flag.value, "command line", flag.where, f"{HANDED_ON}{VARIABLES[name]}")


def variables_of(unused: Iterable[Choice]) -> dict[str, str]:
    """Returns the variables of the fields that are handed on; none where nothing asks for DeepSpeed."""
    in_file: dict[str, str] = {}
    on_command_line: dict[str, str] = {}
    for choice in unused:
        if choice.reason.startswith(HANDED_ON) and choice.field in VARIABLES:
            values = on_command_line if choice.source == "command line" else in_file
            values[VARIABLES[choice.field]] = str(choice.value)
    # The command line is stronger than a file.
    variables = in_file | on_command_line
    return variables if VARIABLES["use_deepspeed"] in variables else {}


def _config(file: Given | None, said: Mapping[str, Given]) -> DeepSpeedConfig:
    """Returns the DeepSpeed config of a file or of the fields.

    Args:
        file: the field that names the file; None if there is none.
        said: the other fields; with a file they give the values of its keys that are "auto".

    Raises:
        ConfigError: `part-missing`.
    """
    given = [file, *said.values()] if file is not None else list(said.values())
    require("deepspeed", "the reader of DeepSpeed's configs is", f"{given[0].name} is given ({given[0].where})")
    from paceline_deepspeed.config import read_block
    from paceline_deepspeed.config.text import JsonBlock, entries_of

    if file is not None:
        hints = {FIELDS[name]: value.value for name, value in said.items()}
        # A file may be called 7, which YAML gives as a number.
        config = file.value if isinstance(file.value, Mapping) else str(file.value)
        source, block = entries_of(config, "DeepSpeedPlugin(hf_ds_config={})")
        # The engine reads these two when it makes them: the script gives the values of their "auto" keys.
        settings = JsonBlock(entry for entry in block if entry.name not in ("optimizer", "scheduler"))
        return read_block(source, settings, hints)
    block = JsonBlock()
    for name, value in said.items():
        _add(block, FIELDS[name].split("."), value)
    return read_block("DeepSpeedPlugin(...)", block, {})


def _add(block: JsonBlock, path: list[str], given: Given) -> None:
    """Adds a value to nested blocks; the path is the names of the blocks and of the key."""
    from paceline_deepspeed.config.text import JsonBlock, JsonEntry

    name, *rest = path
    if not rest:
        block.append(JsonEntry(name, given.value, given.where))
        return
    inside = next((entry.value for entry in block if entry.name == name), None)
    if inside is None:
        inside = JsonBlock()
        block.append(JsonEntry(name, inside, given.where))
    _add(inside, rest, given)


def _as_in_file(text: str) -> object:
    """Returns the value that YAML would read from a flag's text."""
    if text.isdigit():
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)
