"""Placements are chosen and refused; the forecast adds up and stays within the memory that was given."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from inference_models import Model
from torch import nn

from paceline import PlanError
from paceline_large.inference import Rates, Workload, choose_placement, placement_facts, placement_from_map

WORK = Workload(batch=1, tokens=1)
FACTS = placement_facts(Model(width=64, num_blocks=8, rows=100))
BLOCK = next(block.nbytes for block in FACTS.blocks if block.repeated)
REST = FACTS.nbytes - 8 * BLOCK
ACTIVATIONS = 2 * 128 * 4


def homes(placement) -> list[str]:
    return [placed.home for placed in placement.blocks if placed.block.repeated]


def test_everything_on_the_cpu_where_it_fits() -> None:
    placement = choose_placement(FACTS, {"cpu": FACTS.nbytes + ACTIVATIONS}, WORK)
    assert {placed.home for placed in placement.blocks} == {"cpu"} and placement.devices == ("cpu",)
    assert placement.forecast[0].peak == FACTS.nbytes + ACTIVATIONS


def test_equal_shares_on_accelerators() -> None:
    placement = choose_placement(FACTS, {"cuda:0": FACTS.nbytes, "cuda:1": FACTS.nbytes, "cpu": 1}, WORK)
    assert placement.devices == ("cuda:0", "cuda:1") and placement.moves == 1
    first, second = placement.forecast
    assert abs(first.weights - second.weights) <= BLOCK + (1 << 16)


def test_offloaded_blocks_are_spread_and_the_budget_holds() -> None:
    # Two buffers and four blocks fit beside the embedding, the norm and the head.
    budget = REST + 6 * BLOCK + ACTIVATIONS
    placement = choose_placement(FACTS, {"cuda:0": budget, "cpu": 2 * BLOCK}, WORK)
    assert homes(placement) == ["disk", "cuda:0", "cpu", "cuda:0", "disk", "cuda:0", "cpu", "cuda:0"]
    rows = {row.device: row for row in placement.forecast}
    assert rows["cuda:0"].peak <= budget and rows["cuda:0"].buffers == 2 * BLOCK
    assert rows["cpu"].weights == 2 * BLOCK and rows["disk"].weights == 2 * BLOCK
    assert placement.copied_bytes == 4 * BLOCK and placement.disk_bytes == 2 * BLOCK


def test_on_a_cpu_what_has_no_room_waits_on_the_disk() -> None:
    placement = choose_placement(FACTS, {"cpu": REST + 4 * BLOCK + ACTIVATIONS}, WORK)
    assert homes(placement).count("disk") == 6 and placement.num_buffers == 2
    assert placement.copied_bytes == 0 and placement.disk_bytes == 6 * BLOCK


def test_one_buffer_where_two_have_no_room() -> None:
    placement = choose_placement(FACTS, {"cuda:0": REST + BLOCK + ACTIVATIONS, "cpu": 100 * BLOCK}, WORK)
    assert placement.num_buffers == 1 and set(homes(placement)) == {"cpu"}


def test_the_embedding_is_offloaded_too_where_it_must_be() -> None:
    own = FACTS.blocks[0].nbytes
    placement = choose_placement(FACTS, {"cuda:0": own + 2 * BLOCK + ACTIVATIONS, "cpu": 100 * BLOCK}, WORK)
    places = {placed.block.name: placed.home for placed in placement.blocks}
    assert places["embedding"] == "cpu" and places["(model)"] == "cuda:0"
    assert placement.forecast[0].peak <= own + 2 * BLOCK + ACTIVATIONS


def test_earlier_accelerators_are_filled_and_the_last_one_offloads() -> None:
    memory = {"cuda:0": REST + 2 * BLOCK + ACTIVATIONS, "cuda:1": 4 * BLOCK + ACTIVATIONS, "cpu": 100 * BLOCK}
    placement = choose_placement(FACTS, memory, WORK)
    offloaded = [placed for placed in placement.blocks if placed.offloaded]
    assert offloaded and {placed.device for placed in offloaded} == {"cuda:1"}
    assert all(row.budget is None or row.peak <= row.budget for row in placement.forecast)


def test_the_cache_takes_room_where_its_block_computes() -> None:
    facts = dataclasses.replace(FACTS, cache_elements=8 * 1000)
    memory = {"cpu": FACTS.nbytes + ACTIVATIONS}
    placement = choose_placement(facts, memory, WORK)
    assert "disk" in homes(placement)
    row = placement.forecast[0]
    assert row.cache == 8 * 1000 * 4 and row.peak <= memory["cpu"]


@pytest.mark.parametrize("memory", [
    {"cpu": 100},
    {"cpu": ACTIVATIONS + 10},
    {"cuda:0": REST + 2 * BLOCK + ACTIVATIONS, "cpu": BLOCK, "disk": BLOCK},
])  # fmt: skip
def test_what_fits_nowhere_is_refused(memory: dict[str, int]) -> None:
    with pytest.raises(PlanError) as caught:
        choose_placement(FACTS, memory, WORK)
    assert caught.value.code == "placement-memory"


def test_the_message_says_what_would_be_enough() -> None:
    with pytest.raises(PlanError, match=r"KiB would be enough"):
        choose_placement(FACTS, {"cuda:0": ACTIVATIONS + 300, "cpu": 100 * BLOCK}, WORK)


def test_a_model_of_which_nothing_can_be_offloaded_is_refused() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(100, 100))
    model.head = nn.Linear(100, 100, bias=False)
    model.head.weight = model.weight
    facts = placement_facts(model, split_at=["head"])
    assert [block.own for block in facts.blocks] == [True]
    with pytest.raises(PlanError, match="cannot be offloaded") as caught:
        choose_placement(facts, {"cuda:0": 30_000, "cpu": 10**6}, Workload(batch=1, tokens=1))
    assert caught.value.code == "placement-memory"


def test_a_map_is_followed_and_the_longest_name_counts() -> None:
    placement = placement_from_map(FACTS, {"": "cuda:1", "blocks": "cpu", "blocks.7": "disk"})
    assert homes(placement) == ["cpu"] * 7 + ["disk"]
    assert placement.devices == ("cuda:1",)
    assert {placed.source for placed in placement.blocks} == {"code"}


def test_a_map_without_accelerators_computes_on_the_cpu() -> None:
    placement = placement_from_map(FACTS, {"": "disk", "norm": "cpu"})
    assert placement.devices == ("cpu",) and set(homes(placement)) == {"disk"}
    # What has no weights has nothing that could wait on the disk.
    assert placement.blocks[0].home == "cpu"


def test_all_problems_of_a_map_at_once() -> None:
    tied = placement_facts(Model(tied=True))
    with pytest.raises(PlanError) as caught:
        placement_from_map(tied, {"embedding": "cpu", "head": "disk", "blocks.0.up": "cpu", "nothing": "cpu"})
    codes = [problem.code for problem in caught.value.problems]
    assert sorted(codes) == ["placement-missing", "placement-name", "placement-split", "placement-split"]


def test_a_map_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        placement_from_map(FACTS, {"": "cuda:0"}, {"cuda:0": 1000})
    assert caught.value.code == "placement-memory"


def test_the_forecast_in_seconds() -> None:
    rates = Rates(memory=1e9, copy=1e6, disk=1e5, source="stated")
    placement = placement_from_map(FACTS, {"": "cuda:0", "blocks": "cpu", "blocks.0": "disk"}, rates=rates)
    assert placement.pass_seconds() == pytest.approx(8 * BLOCK / 1e6)
    assert placement.pass_seconds(page_cache=False) == pytest.approx(max(8 * BLOCK / 1e6, BLOCK / 1e5))
    alone = dataclasses.replace(placement, num_buffers=1)
    assert alone.pass_seconds() == pytest.approx(FACTS.nbytes / 1e9 + 8 * BLOCK / 1e6)


def test_explain_says_each_place_with_its_reason() -> None:
    text = choose_placement(FACTS, {"cuda:0": REST + 6 * BLOCK + ACTIVATIONS, "cpu": 2 * BLOCK}, WORK).explain()
    assert (
        "2 Block from blocks.2 to blocks.6" in text
        and "= cpu -> cuda:0  <- derived: cuda:0 is full, with 2 buffers" in text
    )
    assert "(assumed rates)" in text and "from the disk" in text
    assert len(text.splitlines()) < 20
