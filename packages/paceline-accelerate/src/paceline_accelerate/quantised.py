"""accelerate's functions that quantise a model by bitsandbytes: its linear layers become 4-bit or 8-bit ones.

bitsandbytes does the arithmetic, and `paceline.parallel.quantised` trains around such layers on several ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from paceline_accelerate.available import is_bnb_available
from paceline_accelerate.errors import CompatImportError, CompatValueError
from paceline_accelerate.kinds import CustomDtype
from paceline_accelerate.loading import load_checkpoint_in_model
from paceline_accelerate.own_device import own_device

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
Model = TypeVar("Model", bound=nn.Module)


@dataclass
class BnbQuantizationConfig:
    """How the linear layers of a model are quantised.

    Attributes:
        load_in_8bit: whether they become `Linear8bitLt`.
        llm_int8_threshold: of 8-bit layers; columns of an input with a larger value are computed in 16 bits.
        load_in_4bit: whether they become `Linear4bit`.
        bnb_4bit_quant_type: "fp4" or "nf4".
        bnb_4bit_use_double_quant: whether the maxima of blocks are quantised as well.
        bnb_4bit_compute_dtype: in which 4-bit layers compute; "fp32", "fp16", "bf16" or a dtype.
        torch_dtype: of the parameters that are not quantised; None for that in which the quantised layers compute.
        skip_modules: names of modules that are not quantised; None for the output layer and tied ones.
        keep_in_fp32_modules: names of modules that are not quantised, and whose parameters become float32.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: str | torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        if self.load_in_8bit == self.load_in_4bit:
            both = f"load_in_8bit={self.load_in_8bit}, load_in_4bit={self.load_in_4bit}"
            raise _wrong("load_in_4bit", both, "True for one of load_in_8bit and load_in_4bit")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise _wrong("bnb_4bit_quant_type", self.bnb_4bit_quant_type, "'fp4' or 'nf4'")
        for name in ("skip_modules", "keep_in_fp32_modules"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                raise _wrong(name, value, "a list of names")
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = _dtype("torch_dtype", self.torch_dtype)
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8
        if not isinstance(self.llm_int8_threshold, (int, float)):
            raise _wrong("llm_int8_threshold", self.llm_int8_threshold, "a number")
        self.llm_int8_threshold = float(self.llm_int8_threshold)
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            warnings.warn(
                "llm_int8_threshold changes 8-bit layers only, and this config asks for 4 bits.", stacklevel=3
            )


def load_and_quantize_model(
    model: Model,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | None = None,
    device_map: Mapping[str, int | str | torch.device] | None = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    offload_folder: str | None = None,
    offload_state_dict: bool = False,
) -> Model:
    """Quantises the linear layers of a model, and moves it to one device.

    Args:
        model: with values, or on the meta device.
        bnb_quantization_config: which layers, and how.
        weights_location: a checkpoint, for a model on the meta device. It is read in the dtype of the model first.
        device_map: the one device of the model; None for the accelerator of this process, or the CPU.
        no_split_module_classes, max_memory, offload_folder, offload_state_dict: have no effect, as the model is on one device.

    Returns:
        The same model; it is not changed where it is refused.

    Raises:
        CompatImportError: `compat-name`, without bitsandbytes.
        CompatValueError: `compat-argument`, for a map with several devices, or values that are missing.
    """
    if not is_bnb_available():
        raise CompatImportError(
            "compat-name",
            "load_and_quantize_model needs bitsandbytes.",
            why="it is not installed in this environment",
            fix="pip install bitsandbytes",
        )
    config = bnb_quantization_config
    device = _one_device(device_map)
    skipped = config.skip_modules
    if skipped is None:
        skipped = get_keys_to_not_convert(model)
    kept = config.keep_in_fp32_modules or []
    if any(parameter.is_meta for parameter in model.parameters()):
        if weights_location is None:
            raise _wrong("weights_location", None, "the folder or file of the model's weights")
        load_checkpoint_in_model(model, weights_location, {"": "cpu"})
        tie_weights: Any = getattr(model, "tie_weights", None)  # of transformers' models
        if tie_weights is not None:
            tie_weights()
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if _is_among(name, kept):
            parameter.data = parameter.data.float()
        elif isinstance(config.torch_dtype, torch.dtype):
            parameter.data = parameter.data.to(config.torch_dtype)
    replace_with_bnb_layers(model, config, [*skipped, *kept])
    model.to(device)
    marked: Any = model
    marked.is_loaded_in_4bit = config.load_in_4bit
    marked.is_loaded_in_8bit = config.load_in_8bit
    return model


def replace_with_bnb_layers(
    model: Model,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> Model:
    """Puts layers of bitsandbytes in the place of linear layers; they are quantised when they are moved to a device.

    Args:
        model: with values, or on the meta device.
        bnb_quantization_config: which kind of layers.
        modules_to_not_convert: names of modules that stay as they are, with what is inside.
        current_key_name: the names of the modules around `model`, outermost first.
    """
    skipped = list(modules_to_not_convert or [])
    around = list(current_key_name or [])
    places = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear and name]
    for name, linear in places:
        if _is_among(".".join([*around, name]), skipped):
            continue
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, _layer_like(linear, bnb_quantization_config))
    return model


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Returns the names of modules that are not quantised: those with tied parameters, and the last one, the output layer."""
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name.rpartition(".")[0])
    tied = [name for names in names_of.values() if len(names) > 1 for name in names]
    last = [name for name, _ in model.named_children()][-1:]
    # A model of transformers without a head, such as `LlamaModel`, has no output layer.
    prefix = getattr(model, "base_model_prefix", None)
    if prefix is not None and not hasattr(model, prefix) and not tied:
        return []
    return list(dict.fromkeys([*tied, *last]))


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Returns whether some layer is a 4-bit one of bitsandbytes."""
    import bitsandbytes

    return any(isinstance(module, bitsandbytes.nn.Linear4bit) for module in model.modules())


def _layer_like(linear: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    """Returns a frozen layer of bitsandbytes with the weights of a linear layer, in their memory until it is moved."""
    import bitsandbytes

    nn_layers = bitsandbytes.nn
    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    values = linear.weight.data
    layer: Any
    if config.load_in_4bit:
        layer = nn_layers.Linear4bit(*sizes, config.bnb_4bit_compute_dtype, device="meta")
        layer.weight = nn_layers.Params4bit(
            values,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            module=layer,
        )
    else:
        layer = nn_layers.Linear8bitLt(
            *sizes, has_fp16_weights=False, threshold=config.llm_int8_threshold, device="meta"
        )
        layer.weight = nn_layers.Int8Params(values, requires_grad=False)
    if linear.bias is not None:
        layer.bias = linear.bias
    layer.train(linear.training)
    layer.requires_grad_(False)
    quantised: nn.Module = layer
    return quantised


def _one_device(device_map: Mapping[str, int | str | torch.device] | str | None) -> torch.device:
    """Returns the device of a model.

    Raises:
        CompatValueError: `compat-argument`, for a map with several devices, or with the disk.
    """
    own = own_device()
    if own.type != "cpu":
        own = torch.device(own.type, torch.accelerator.current_device_index())
    if device_map is None or isinstance(device_map, str):
        return own
    places = set(device_map.values())
    if len(places) != 1 or "disk" in places:
        raise _wrong("device_map", dict(device_map), "one device for all modules, such as {'': 0}")
    (place,) = places
    if isinstance(place, int):
        return torch.device(own.type, place)
    return torch.device(place)


def _is_among(name: str, modules: Sequence[str]) -> bool:
    """Returns whether a name, or a module around it, is called so: by its whole name, or by one part of it."""
    parts = name.split(".")
    return any(name == module or name.startswith(f"{module}.") or module in parts for module in modules)


def _dtype(name: str, value: str | torch.dtype) -> torch.dtype:
    dtype = _DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise _wrong(name, value, "'fp32', 'fp16', 'bf16' or a dtype")
    return dtype


def _wrong(name: str, value: object, expected: str) -> CompatValueError:
    return CompatValueError(
        "compat-argument",
        f"`{name}` cannot be {value!r}.",
        why="no layer of bitsandbytes is made so",
        fix=f"give {expected}",
    )
