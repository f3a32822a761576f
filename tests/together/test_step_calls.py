"""How many Python calls a step makes beyond plain PyTorch: no change may add some unnoticed.

A number that has become smaller belongs here. `python tests/step_calls.py one:clip` lists who makes the calls.
"""

from __future__ import annotations

from step_calls import count_all, outside_of_torch

from paceline.testing import run_ranks

# Calls a micro-batch of functions that are none of torch's.
ONE = {
    "plain": 112,
    "accumulate": 118,
    "window of 2": 168,
    "num_items": 123,
    "clip": 142,
    "two optimizers": 147,
    "all": 244,
    "accelerate": 154,
    "deepspeed": 175,
}
TWO = {
    ("replicate", "accumulate"): 217,
    ("replicate", "all"): 388,
    ("zero 2", "accumulate"): 412,
    ("zero 2", "all"): 598,
    ("shard", "accumulate"): 563,
    ("shard", "all"): 896,
}


def test_a_step_of_one_process() -> None:
    calls = run_ranks(count_all, world=1, args=(("one",), tuple(ONE)))[0]
    counted = {name: round(outside_of_torch(calls["one", name])) for name in ONE}
    assert {name: number for name, number in counted.items() if number > ONE[name]} == {}


def test_a_step_of_two_ranks() -> None:
    calls = run_ranks(count_all, world=2, args=(("replicate", "zero 2", "shard"), ("accumulate", "all")))[0]
    counted = {key: round(outside_of_torch(calls[key])) for key in TWO}
    assert {key: number for key, number in counted.items() if number > TWO[key]} == {}
