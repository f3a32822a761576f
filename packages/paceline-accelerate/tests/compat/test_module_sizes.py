"""Sizes of modules and device maps: what accelerate 1.15 answers in small cases."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline_accelerate.device_map import infer_auto_device_map
from paceline_accelerate.module_sizes import dtype_byte_size, get_balanced_memory
from paceline_accelerate.module_tensors import set_module_tensor_to_device


def linear(width: int) -> nn.Linear:
    return nn.Linear(width, 1, bias=False)


def test_a_fallback_keeps_room_for_a_skipped_parameter() -> None:
    model = nn.ModuleDict({"small": linear(12)})
    model.weight = nn.Parameter(torch.zeros(30))
    # 126 bytes less the 120 of the skipped parameter are too few for the 48 of the layer.
    places = infer_auto_device_map(model, {0: 126}, fallback_allocation=True, clean_result=False)
    assert dict(places) == {"weight": "disk", "small": "disk"}


class Tree(nn.Module):
    """A module with parts of its own class."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        for number, width in enumerate(widths):
            self.add_module(f"part{number}", Tree(width) if len(widths) > 1 else linear(width))


def test_a_balanced_share_has_room_for_a_block_and_not_for_the_model() -> None:
    memory = get_balanced_memory(Tree(10, 10, 10), {0: 1000, 1: 1000}, no_split_module_classes=["Tree"])
    # Half of 120 bytes, and a block of 40 with a quarter more.
    assert memory == {0: 110, 1: 1000}


def test_a_dtype_that_torch_does_not_have_may_be_a_text() -> None:
    assert dtype_byte_size("fp8") == 1


@pytest.mark.parametrize("device", ["disk", 0])
def test_a_missing_value_is_reported_for_any_device(device: str | int) -> None:
    with pytest.raises(ValueError, match="meta device"):
        set_module_tensor_to_device(linear(2).to("meta"), "weight", device)
