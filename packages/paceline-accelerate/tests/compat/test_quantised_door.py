"""accelerate's `load_and_quantize_model` gives bitsandbytes' own layers, with the weights of the model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from late_module import LateModule
from torch import nn

from paceline_accelerate.big_modeling import init_empty_weights
from paceline_accelerate.quantised import (
    BnbQuantizationConfig,
    get_keys_to_not_convert,
    has_4bit_bnb_layers,
    load_and_quantize_model,
)

bnb = LateModule("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64, bias=False), nn.Linear(64, 2))


def quantised_alone(linear: nn.Linear, layer: nn.Module) -> nn.Module:
    layer.load_state_dict(linear.state_dict())
    return layer.to("cpu")


def test_a_model_with_values_becomes_a_4_bit_one() -> None:
    model = network()
    original = copy.deepcopy(model)
    assert get_keys_to_not_convert(model) == ["3"]
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32")
    assert load_and_quantize_model(model, config) is model
    assert has_4bit_bnb_layers(model) and model.is_loaded_in_4bit and not model.is_loaded_in_8bit
    assert type(model[3]) is nn.Linear
    alone = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=False)
    x = torch.randn(3, 64)
    assert torch.equal(model[0](x), quantised_alone(original[0], alone)(x))
    assert not any(parameter.requires_grad for parameter in model[0].parameters())


def test_a_checkpoint_becomes_an_8_bit_model(tmp_path: Path) -> None:
    original = network()
    torch.save(original.state_dict(), tmp_path / "weights.bin")
    with init_empty_weights():
        empty = network()
    with pytest.raises(ValueError, match="weights_location"):
        load_and_quantize_model(empty, BnbQuantizationConfig(load_in_8bit=True))
    config = BnbQuantizationConfig(load_in_8bit=True, skip_modules=["2"], torch_dtype="bf16")
    model = load_and_quantize_model(empty, config, str(tmp_path / "weights.bin"))
    assert type(model[2]) is nn.Linear and model[2].weight.dtype == torch.bfloat16
    assert type(model[3]) is bnb.nn.Linear8bitLt
    alone = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0)
    x = torch.randn(3, 64)
    halves = original[0].bfloat16()
    assert torch.equal(model[0](x), quantised_alone(halves, alone.bfloat16())(x))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"load_in_4bit": True, "load_in_8bit": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "int4"},
        {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp8"},
        {"load_in_8bit": True, "skip_modules": "head"},
        {"load_in_8bit": 1},
    ],
)
def test_what_no_layer_of_bitsandbytes_takes(fields) -> None:
    with pytest.raises(ValueError, match=r"\[compat-argument\]"):
        BnbQuantizationConfig(**fields)


def test_several_devices_are_refused() -> None:
    model = network()
    with pytest.raises(ValueError, match="device_map"):
        load_and_quantize_model(model, BnbQuantizationConfig(load_in_4bit=True), device_map={"0": "cpu", "2": "disk"})
    assert type(model[0]) is nn.Linear
