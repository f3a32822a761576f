"""Functions that tests of scripts replace: each module of ours that calls them calls the replacement."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("theirs", "name", "ours"),
    [
        ("accelerate.utils.modeling", "retie_parameters", "paceline_accelerate.loading"),
        ("accelerate.data_loader", "prepare_data_loader", "paceline_accelerate.preparation"),
        ("deepspeed.accelerator.real_accelerator", "get_accelerator", "paceline_deepspeed.comm"),
    ],
)
def test_callers_in_other_modules_call_the_replacement(serve, theirs: str, name: str, ours: str) -> None:
    serve(theirs.partition(".")[0])
    caller = importlib.import_module(ours)
    served = importlib.import_module(theirs)
    original = getattr(caller, name)

    def replacement(*arguments: object) -> None:
        pass

    setattr(served, name, replacement)
    assert getattr(caller, name) is replacement
    setattr(served, name, original)
    assert getattr(caller, name) is original
