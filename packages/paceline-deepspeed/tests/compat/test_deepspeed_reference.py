"""The same under the real DeepSpeed (recorded, with its version and date in the files) and under ours."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import pairs_by_day
from torch import nn

from paceline import ConfigError
from paceline.precision.scale import Growth
from paceline.testing import run_ranks
from paceline_deepspeed import partition
from paceline_deepspeed.config import read
from paceline_deepspeed.initialize import scaler_options
from paceline_deepspeed.schedules import build

REFERENCE = Path(__file__).parent / "deepspeed_reference"
PRODUCT = re.compile(r"(\w+) zero (\d) accumulate (\d) clip (\S+)")
sys.path.insert(0, str(REFERENCE))
try:
    import cases
finally:
    sys.path.remove(str(REFERENCE))


def recorded(part: str) -> Any:
    return json.loads((REFERENCE / f"{part}.json").read_text(encoding="utf-8"))[part]


def test_what_is_recorded_says_of_what() -> None:
    for part in ("batch", "partitions", "scale", "schedules", "training"):
        versions = json.loads((REFERENCE / f"{part}.json").read_text(encoding="utf-8"))["versions"]
        assert versions["deepspeed"] == "0.19.8" and versions.keys() == {"deepspeed", "torch", "date"}


# -- schedules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.SCHEDULES)
def test_a_schedule_over_1000_steps(name: str) -> None:
    kind, parameters = cases.SCHEDULES[name]
    want = recorded("schedules")[name]
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **cases.GROUP)  # type: ignore[arg-type]
    schedule = build(kind, optimizer, parameters)
    (group,) = optimizer.param_groups
    rates, betas = [], []
    for _ in range(cases.STEPS):
        rates.append(group["lr"])
        betas.append(group["betas"])
        schedule.step()
    assert rates == pytest.approx(want["rates"], rel=1e-7, abs=1e-12)
    first = want["betas"] if len(want["betas"]) == cases.STEPS else [want["betas"][0]] * cases.STEPS
    assert [each[0] for each in betas] == pytest.approx(first, rel=1e-7)
    assert sorted({each[1] for each in betas}) == want["beta2"]
    assert schedule.state_dict() == want["state"]
    assert schedule.get_last_lr() == [group["lr"]]


# -- the loss scale ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.SCALES)
def test_the_path_of_the_loss_scale(name: str) -> None:
    given, overflows = cases.SCALES[name]
    want = recorded("scale")[name]
    fp16 = {f"fp16.{key}": value for key, value in given.items()}
    options = scaler_options({"zero_optimization.stage": 1, "fp16.loss_scale": 0, **fp16})
    assert (options.pop("bad_loss"), options.pop("at_minimum")) == ("skip", "raise")
    growth = Growth.of(options)
    path, gave_up = [], False
    for step in range(cases.SCALE_STEPS):
        path.append(growth.scale)
        gave_up = step in overflows and growth.exhausted
        if gave_up:
            break
        growth.update(step in overflows)
    assert (path, gave_up) == (want["path"], want["gave_up"])


# -- partitions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cases.LAYERS)
def test_the_partition_of_a_list_of_layers(name: str) -> None:
    row = recorded("partitions")[name]
    assert row["sizes"] == cases.LAYERS[name]
    for case in row["partitions"]:
        method, stages = case["method"], case["stages"]
        if method == "uniform":
            found = partition.uniform(len(row["sizes"]), stages)
        elif method == "parameters":
            found = partition.balanced(row["sizes"], stages)
        else:
            found = partition.balanced(partition.matches(method, row["classes"]), stages)
        assert found == case["parts"], (method, stages)


# -- the batch triangle ------------------------------------------------------------------------------------------------

KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def test_the_batch_triangle_and_its_errors() -> None:
    for row in recorded("batch"):
        config = {key: value for key, value in zip(KEYS, row["given"], strict=True) if value is not None}
        if "error" in row:
            with pytest.raises(ConfigError):
                read(config).batch(row["width"])
            continue
        if 0 in config.values():
            continue  # a 0 that DeepSpeed passes over; ours says that it counts nothing
        found = read(config).batch(row["width"])
        assert [found.train, found.micro, found.accumulate] == row["result"], row


# -- training ----------------------------------------------------------------------------------------------------------


def served(names: list[str]) -> Any:
    """The training programs under the names that we serve; in a process of its own."""
    from paceline.compat import install

    install(["deepspeed"])
    sys.path.insert(0, str(REFERENCE))
    import programs

    return programs.everything(names)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the programs give here, of which the tests run that have been chosen."""
    here = [item for item in request.session.items if item.path == request.path]
    chosen = {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}
    names = [name for name in (*cases.TRAINING, *cases.FP16_TRAINING) if name in chosen]
    return run_ranks(served, world=2, args=([*names, "parts"],), timeout_s=200)[0]


def of_the_day() -> list[Any]:
    """Each model with each stage, window and clip, and each stage with each window and clip; all of them at night."""
    products = {name: found.groups() for name in cases.TRAINING if (found := PRODUCT.fullmatch(name))}
    paired = pairs_by_day(products.values())
    marks = {name: parameter.marks for name, parameter in zip(products, paired, strict=True)}
    return [pytest.param(name, marks=marks.get(name, ())) for name in cases.TRAINING]


@pytest.mark.parametrize("name", of_the_day())
def test_losses_step_by_step(trained: dict[str, Any], name: str) -> None:
    found, want = trained[name], recorded("training")[name]
    digits = 2e-6
    if "bf16" in name:  # theirs casts weights, ours casts what enters each operation
        digits = 5e-2 if name.endswith("0") else 6e-3  # at stage 0 theirs keeps no float32 weights
    for step, losses in enumerate(want["losses"]):
        assert found["losses"][step] == pytest.approx(losses, rel=digits, abs=digits), step
    assert found["rates"] == pytest.approx(want["rates"], rel=1e-7)
    if want["norms"]:
        assert found["norms"] == pytest.approx(want["norms"], rel=1e-5)


@pytest.mark.parametrize("name", cases.FP16_TRAINING)
def test_the_loss_scale_of_a_run_that_overflows(trained: dict[str, Any], name: str) -> None:
    assert trained[name] == recorded("training")[name]


def test_where_pipeline_modules_are_cut(trained: dict[str, Any]) -> None:
    assert trained["parts"] == recorded("training")["parts"]
