"""`accelerate.utils.DeepSpeedPlugin`: turns what a script or the launcher says about DeepSpeed into one DeepSpeed config.

    DeepSpeedPlugin(zero_stage=2)             a config is written from the fields
    DeepSpeedPlugin(hf_ds_config="ds.json")   the fields are what the config says; they fill in what is "auto" in it
    DeepSpeedPlugin()                         the fields come from ACCELERATE_DEEPSPEED_*, which the launcher sets

Values that are still "auto" become known only when models and loaders are prepared (`deepspeed_preparation`).
"""

from __future__ import annotations

import copy
import importlib.util
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.base import env as environment
from paceline.base.errors import ConfigError
from paceline.base.log import warn_once
from paceline.config.given import Given
from paceline_accelerate.deepspeed_config import HfDeepSpeedConfig, without_auto
from paceline_accelerate.deepspeed_words import FIELDS, ROWS, VARIABLES, said_by
from paceline_accelerate.kinds import DistributedType


@dataclass
class DeepSpeedPlugin:
    """The options of DeepSpeed; fields that are left None are filled from ACCELERATE_DEEPSPEED_* variables.

    Args:
        hf_ds_config: a DeepSpeed config: its path, a dict or a `HfDeepSpeedConfig`.
        gradient_accumulation_steps: micro-batches in a step; "auto" takes the accelerator's number.
        gradient_clipping: largest norm of the gradients.
        zero_stage: 0 to 3; the default is 2.
        is_train_batch_min: whether the engine uses the smallest batch size of several loaders.
        offload_optimizer_device, offload_param_device: "cpu", "nvme" or "none".
        offload_optimizer_nvme_path, offload_param_nvme_path: the folder of states, and of parameters and states, on a disk.
        zero3_init_flag: whether transformers builds models with `deepspeed.zero.Init`; stage 3 only.
        zero3_save_16bit_model: whether stage 3 saves whole models.
        transformer_moe_cls_names, enable_msamp, msamp_opt_level: have no effect here.

    Attributes:
        deepspeed_config: the config as nested dicts; the same object as `hf_ds_config.config`.

    Raises:
        ConfigError: `config-file`, `config-syntax`, `deepspeed-conflict`.
    """

    hf_ds_config: Any = None
    gradient_accumulation_steps: Any = None
    gradient_clipping: Any = None
    zero_stage: Any = None
    is_train_batch_min: bool = True
    offload_optimizer_device: Any = None
    offload_param_device: Any = None
    offload_optimizer_nvme_path: Any = None
    offload_param_nvme_path: Any = None
    zero3_init_flag: Any = None
    zero3_save_16bit_model: Any = None
    transformer_moe_cls_names: Any = None
    enable_msamp: Any = None
    msamp_opt_level: Any = None

    def __post_init__(self) -> None:
        self._given = self._fill_from_environment()
        if self.hf_ds_config in (None, "none"):
            self.hf_ds_config = HfDeepSpeedConfig(self._config_of_fields())
        else:
            self._read_config()
        self.deepspeed_config: dict[str, Any] = self.hf_ds_config.config
        # DeepSpeed's engine prints a line every `steps_per_print` steps; accelerate silences it in this way.
        self.deepspeed_config["steps_per_print"] = math.inf
        self._set_zero3_init()
        self._selected = False
        # transformers' own object for the config.
        self.dschf: Any = None

    def _fill_from_environment(self) -> list[Given]:
        """Fills fields that are None; returns the values that the script or a variable gave, each with its source."""
        env = environment.snapshot()
        given = []
        for row in ROWS:
            if row.parse is None:
                continue
            name = row.attribute or row.name
            text = env.get(row.variable, "")
            if getattr(self, name) is not None:
                given.append(Given(name, getattr(self, name), "code", f"DeepSpeedPlugin({name}=...)"))
            elif text and text not in ("none", "auto"):
                setattr(self, name, row.parse(text))
                given.append(Given(name, getattr(self, name), "environment", row.variable))
            else:
                setattr(self, name, row.default)
        return given

    def _config_of_fields(self) -> dict[str, Any]:
        zero = {
            "stage": self.zero_stage,
            "offload_optimizer": self._offload("optimizer"),
            "offload_param": self._offload("param"),
            "stage3_gather_16bit_weights_on_model_save": self.zero3_save_16bit_model,
        }
        config: dict[str, Any] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "zero_optimization": zero,
        }
        if self.gradient_clipping:
            config["gradient_clipping"] = self.gradient_clipping
        return config

    def _offload(self, what: str) -> dict[str, Any]:
        device = getattr(self, f"offload_{what}_device")
        path = getattr(self, f"offload_{what}_nvme_path") if device == "nvme" else None
        return {"device": device, "nvme_path": path}

    def _read_config(self) -> None:
        """Replaces "auto" in the config by values of the fields, and then sets the fields from the config."""
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        config = self.hf_ds_config.config
        if "zero_optimization" not in config:
            what = "the DeepSpeed config has no ZeRO optimization config: its block `zero_optimization` is missing."
            fix = 'write it: `"zero_optimization": {"stage": 2}`; stage 0 divides nothing'
            raise ConfigError("deepspeed-conflict", what, why="accelerate asks for it in each config", fix=fix)
        self._refuse_fields_beside_config()
        config.setdefault("gradient_accumulation_steps", 1)
        values = {key: getattr(self, name) for name, key in FIELDS.items() if getattr(self, name) != "auto"}
        for key in values:
            self.fill_match(key, must_match=False, **values)
        self.hf_ds_config.set_stage_and_offload()
        for name, key in FIELDS.items():
            value = self.hf_ds_config.get_value(key)
            if value is not None and value != "auto":
                setattr(self, name, value)

    def _refuse_fields_beside_config(self) -> None:
        """Refuses fields that the launcher's file gives beside a config file, because they would have no effect."""
        said = environment.snapshot().get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
        beside = [name for name in (*FIELDS, "mixed_precision") if name in said]
        if beside:
            what = f"{', '.join(beside)} and a DeepSpeed config file were both given."
            why = "the config file alone counts; ACCELERATE_CONFIG_DS_FIELDS lists what the launcher's file says"
            fix = f"take {', '.join(beside)} out of the launcher's file, and write them into the DeepSpeed config"
            raise ConfigError("deepspeed-conflict", what, why=why, fix=fix)

    def _set_zero3_init(self) -> None:
        is_zero3 = self.hf_ds_config.is_zero3()
        if self.zero3_init_flag is None:
            text = environment.snapshot().get(VARIABLES["zero3_init_flag"], "")
            self.zero3_init_flag = environment.parse_bool(text) if text else is_zero3
        if self.zero3_init_flag and not is_zero3:
            warnings.warn("zero3_init_flag has an effect at ZeRO stage 3 only: it is switched off.", stacklevel=4)
            self.zero3_init_flag = False

    # -- keys that are "auto" --------------------------------------------------------------------------------------

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Replaces a key that is "auto" by its value in `kwargs`, or compares the value that it has with that.

        Args:
            ds_key_long: dotted name of the key.
            mismatches: receives a line if the values differ.
            must_match: whether the values are compared.
            kwargs: values by dotted name.

        Raises:
            ConfigError: `deepspeed-auto`, if the key is "auto" and `kwargs` has no value for it.
        """
        block, key = self.hf_ds_config.find_config_node(ds_key_long)
        if block is None:
            return
        value = block.get(key)
        if value == "auto":
            if ds_key_long not in kwargs:
                what = f"`{ds_key_long}` is auto in the DeepSpeed config, and not found in kwargs."
                fix = f"give {ds_key_long} a value in the DeepSpeed config, or pass it as a keyword"
                raise ConfigError("deepspeed-auto", what, why=f"values are known for: {', '.join(kwargs)}", fix=fix)
            block[key] = kwargs[ds_key_long]
            return
        wanted = kwargs.get(ds_key_long, value)
        if must_match and value is not None and mismatches is not None and value != wanted:
            mismatches.append(f"- ds {ds_key_long}={value} vs arg {ds_key_long}={wanted}")

    def is_auto(self, ds_key_long: str) -> bool:
        """Whether a key is given as "auto"."""
        return bool(self.hf_ds_config.get_value(ds_key_long) == "auto")

    def get_value(self, ds_key_long: str, default: object = None) -> Any:
        """Returns the value of a key, or `default` if the config does not have it."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Replaces every key that is "auto" by its value in `kwargs`, and compares the others.

        Args:
            prefix: dotted name of `config` within the whole config, with a dot at its end.
            mismatches: receives a line for each value that differs; with a prefix the caller reports them.
            config: a block of the config; None is the whole config.
            must_match: whether values are compared.
            kwargs: values by dotted name.

        Raises:
            ConfigError: `deepspeed-auto`; `deepspeed-conflict` with all values that differ.
        """
        mismatches = [] if mismatches is None else mismatches
        block = self.deepspeed_config if config is None else config
        for name, value in block.items():
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{name}.", mismatches, value, must_match, **kwargs)
            else:
                self.fill_match(f"{prefix}{name}", mismatches, must_match, **kwargs)
        # The recursive calls have a prefix: only the outermost call raises, with the mismatches of all blocks.
        if mismatches and not prefix:
            what = "these DeepSpeed config values mismatch kwargs values."
            fix = 'write "auto" for these keys in the DeepSpeed config, and the arguments count'
            raise ConfigError("deepspeed-conflict", what, why=mismatches, fix=fix)

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Writes the run's precision into the config if the config does not choose one.

        Raises:
            ConfigError: `deepspeed-conflict`, if the config asks for the other 16-bit precision.
        """
        asked = "bf16" if mixed_precision == "fp8" else mixed_precision
        config = self.deepspeed_config
        if asked == "fp16" and "fp16" not in config:
            config["fp16"] = {"enabled": True, "auto_cast": True}
        elif asked == "bf16" and "bf16" not in config:
            config["bf16"] = {"enabled": True}
        other = {"fp16": "bf16", "bf16": "fp16"}.get(asked)
        if other is not None and config.get(other, {}).get("enabled") is True:
            what = (
                f"mixed_precision cannot be set to `{mixed_precision}` when `{other}` is set in the DeepSpeed config."
            )
            fix = f"write `mixed_precision='{other}'`, or take the block {other} out of the DeepSpeed config"
            raise ConfigError("deepspeed-conflict", what, why=f"{other}.enabled is true", fix=fix)
        for dtype in ("fp16", "bf16"):
            config.setdefault(dtype, {"enabled": False})
            values: dict[str, Any] = {f"{dtype}.enabled": asked == dtype}
            self.fill_match(f"{dtype}.enabled", must_match=False, **values)

    # -- which of several plugins is selected, and what transformers knows about it ----------------------------------

    @property
    def selected(self) -> bool:
        """Whether this plugin is the selected one."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError("a plugin is selected by `AcceleratorState().select_deepspeed_plugin(name)`")

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Selects this plugin; `AcceleratorState.select_deepspeed_plugin` calls it.

        Raises:
            ConfigError: `deepspeed-plugin`, if a script calls it.
        """
        if not _from_accelerator_state:
            what = "a script called `plugin.select()`."
            fix = "call `accelerator.state.select_deepspeed_plugin(name)`"
            raise _refused(what, "the others must be switched off at the same time", fix)
        self._selected = True
        self.set_deepspeed_weakref()

    def _unselect(self) -> None:
        self._selected = False

    def _set_selected(self, value: bool) -> None:
        self._selected = value

    def set_deepspeed_weakref(self) -> None:
        """Tells transformers about the config, so that `from_pretrained` builds models for stage 3.

        transformers keeps only a weak reference, so the plugin owns the object that it refers to.

        Raises:
            ConfigError: `deepspeed-plugin`, if `zero3_init_flag` is set and transformers is not installed.
        """
        has_transformers = importlib.util.find_spec("transformers") is not None
        if self.zero3_init_flag and not has_transformers:
            why = "with zero3_init_flag transformers divides a model while it builds it; it is not installed"
            raise _refused("zero3_init_flag needs transformers.", why, "pip install transformers")
        # transformers' config class checks that deepspeed is installed, which it is not with accelerate's door alone.
        if not has_transformers or importlib.util.find_spec("deepspeed") is None:
            return
        from transformers.integrations.deepspeed import HfDeepSpeedConfig as TransformersConfig
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        if not self.zero3_init_flag:
            self.dschf = None
            unset_hf_deepspeed_config()
            return
        config = copy.deepcopy(self.deepspeed_config)
        for name in ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"):
            if config.get(name) == "auto":
                config[name] = 1
        self.dschf = TransformersConfig(config)

    def is_zero3_init_enabled(self) -> bool:
        """Whether transformers builds models with `deepspeed.zero.Init`."""
        return bool(self.zero3_init_flag)

    @contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Makes transformers build models with `deepspeed.zero.Init`, or without it, in a `with` block."""
        before = self.zero3_init_flag
        if before == enable:
            yield
            return
        self.zero3_init_flag = enable
        self.set_deepspeed_weakref()
        try:
            yield
        finally:
            self.zero3_init_flag = before
            self.set_deepspeed_weakref()

    def set_moe_leaf_modules(self, model: Any) -> None:
        """Does nothing: modules that are gathered together are found when the model is prepared."""

    # -- translation into Paceline's settings --------------------------------------------------------------------------

    def said(self) -> list[Given]:
        """Returns Paceline's settings with the same meaning; a warning, once, names the fields that have no effect.

        Keys that are still "auto" give no setting.

        Raises:
            ConfigError: as `paceline_deepspeed.config.read`.
        """
        given_config = next((given for given in self._given if given.name == "hf_ds_config"), None)
        if given_config is None:
            fields = [given for given in self._given if given.value != "auto"]
        else:
            # The infinity that `__post_init__` wrote there is not the script's.
            config = without_auto({**self.deepspeed_config, "steps_per_print": "auto"})
            fields = [Given("hf_ds_config", config, "code", given_config.where)]
        translation = said_by(fields, "code", "DeepSpeedPlugin(...)")
        if translation.unused:
            rows = "; ".join(f"{row.field} ({row.where}): {row.reason}" for row in translation.unused)
            warn_once("config", f"{rows}.")
        return translation.given

    def __getstate__(self) -> dict[str, Any]:
        # The object to which transformers refers belongs to this process.
        return {**self.__dict__, "dschf": None}


def _refused(what: str, why: str, fix: str) -> ConfigError:
    return ConfigError("deepspeed-plugin", what, why=why, fix=fix)


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """Returns the plugin that is selected at the moment.

    Args:
        state: an `AcceleratorState`.

    Raises:
        ConfigError: `deepspeed-plugin`, if the run has none.
    """
    plugins: Mapping[str, DeepSpeedPlugin] | None = getattr(state, "deepspeed_plugins", None)
    if getattr(state, "distributed_type", None) != DistributedType.DEEPSPEED or not plugins:
        fix = "pass `Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))`, or launch with --use_deepspeed"
        raise _refused("this run does not use DeepSpeed.", "the accelerator was made without a DeepSpeedPlugin", fix)
    return next(plugin for plugin in plugins.values() if plugin.selected)
