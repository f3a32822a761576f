"""What is placed as a whole: repeated blocks, classes that the model names, and modules that share a parameter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from inference_models import Model
from torch import nn

from paceline_large.inference import placement_facts


def names(model: nn.Module, **options: object) -> list[str]:
    return [block.name for block in placement_facts(model, **options).blocks]


def test_blocks_in_order_of_definition() -> None:
    model = Model(num_blocks=2)
    assert names(model) == ["(model)", "embedding", "blocks.0", "blocks.1", "norm", "head"]
    facts = placement_facts(model)
    assert facts.nbytes == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert [block.repeated for block in facts.blocks] == [False, False, True, True, False, False]
    assert facts.blocks[0].own and facts.blocks[0].parameter_bytes == 0 and facts.blocks[0].buffer_bytes == 4 * 17


def test_modules_that_share_a_parameter_are_one_block_and_count_once() -> None:
    model = Model(num_blocks=2, tied=True)
    assert names(model)[1] == "embedding + head"
    assert placement_facts(model).nbytes == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def test_a_third_module_joins_two_blocks() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    third = nn.Module()
    third.weight, third.bias = model["a"].weight, model["b"].bias
    model["c"] = third
    assert names(model) == ["a + c + b"]


def test_a_dtype_changes_the_bytes_of_weights_and_not_of_buffers() -> None:
    full, half = placement_facts(Model()), placement_facts(Model(), torch.bfloat16)
    assert [block.parameter_bytes for block in full.blocks] == [2 * block.parameter_bytes for block in half.blocks]
    assert [block.buffer_bytes for block in full.blocks] == [block.buffer_bytes for block in half.blocks]
    assert half.itemsize == 2


def test_classes_that_the_model_names_stay_whole() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert names(model) == ["0.0", "0.2", "1"]

    class Pair(nn.Sequential):
        pass

    model[0] = Pair(nn.Linear(2, 2), nn.Linear(2, 2))
    model._no_split_modules = ["Pair"]
    assert names(model) == ["0", "1"]


def test_blocks_can_be_split_for_a_map_of_another_library() -> None:
    assert "blocks.1.up" in names(Model(), split_at=["blocks.1.up"])
    assert "blocks.1" not in names(Model(), split_at=["blocks.1.up"])


def test_a_module_with_tensors_of_its_own_and_no_blocks_below_is_whole() -> None:
    assert names(nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))) == ["0", "1"]


@pytest.mark.parametrize(("config", "elements"), [
    (SimpleNamespace(num_hidden_layers=4, num_attention_heads=8, hidden_size=64), 2 * 4 * 64),
    (SimpleNamespace(num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, hidden_size=64), 2 * 4 * 16),
    (SimpleNamespace(num_hidden_layers=4, num_attention_heads=8, hidden_size=64, head_dim=16), 2 * 4 * 128),
    (SimpleNamespace(num_hidden_layers=4), 0),
])  # fmt: skip
def test_the_cache_is_known_from_a_config(config: SimpleNamespace, elements: int) -> None:
    model = Model()
    model.config = config
    assert placement_facts(model).cache_elements == elements


def test_the_widest_activation() -> None:
    assert placement_facts(Model(width=16, rows=20)).widest == 32
    assert placement_facts(Model(width=4, rows=20)).widest == 20
