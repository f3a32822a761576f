"""Defaults and arguments that a script written for DeepSpeed relies on without naming them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.compat.deepspeed.initialize import initialize
from paceline.compat.deepspeed.optimizers import FusedLion, build
from paceline.optim.lion import Lion


def test_lion_has_deepspeeds_betas() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    for made in (FusedLion(weights), build("Lion", {"lr": 0.1}, weights)):
        assert type(made) is Lion and isinstance(made, FusedLion)
        assert made.defaults["betas"] == (0.9, 0.999)


def test_a_loading_function_of_the_script_is_called() -> None:
    def load(src: dict[str, Any], dst: nn.Module) -> None:
        dst.load_state_dict({name.removeprefix("old."): value for name, value in src.items()})

    engine, *_ = initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1}, dist_init_required=False)
    engine.load_module_state_dict({"module": {"old.weight": torch.ones(1, 2), "old.bias": torch.ones(1)}}, True, load)
    assert engine.module.weight.tolist() == [[1.0, 1.0]]
