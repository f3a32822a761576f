"""A checkpoint comes to its places: whatever its format, each weight with its value, and with what stands in the way."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from inference_models import IDS, Model, made
from safetensors.torch import save_file
from torch import nn

from paceline import CheckpointError, PlanError, PrepareError, TrainError
from paceline.checkpoint import save_model
from paceline_large import inference
from paceline_large.inference.memory import _free_on_host
from paceline_large.inference.placement import PlacedBlock

FORMATS = ["whole", "cut", "torch"]


def saved(model: nn.Module, folder, kind: str = "whole") -> str:
    save_model(model, folder, 4000 if kind == "cut" else "10GB", safe_serialization=kind != "torch")
    return str(folder)


@pytest.mark.parametrize("placement", ["auto", "cpu", "disk", {"": "cpu", "blocks.1": "disk", "head": "disk"}])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_model_computes_as_it_was_saved(placement, tied: bool, kind: str, tmp_path) -> None:
    if tied and isinstance(placement, dict):
        placement = {**placement, "embedding": "disk"}
    plain = made(tied=tied)
    folder = saved(plain, tmp_path / "model", kind)
    model = inference.load(lambda: Model(tied=tied), folder, placement=placement, offload_folder=tmp_path / "offload")
    assert not model.training
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(IDS), plain(IDS))
    assert (model.head.weight is model.embedding.weight) == tied
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_files_are_used_where_they_lie(tmp_path) -> None:
    folder = saved(made(), tmp_path / "model")
    model = inference.load(Model, folder, placement={"": "disk", "norm": "cpu"})
    before = model.head.weight.data_ptr()
    with torch.no_grad():
        model(IDS)
    assert model.head.weight.data_ptr() == before
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if line.endswith("model.safetensors")]
    assert any(int(start, 16) <= before < int(stop, 16) for start, stop in ranges)
    norm = model.norm.weight.data_ptr()
    assert not any(int(start, 16) <= norm < int(stop, 16) for start, stop in ranges)


def test_a_dtype_converts_weights_and_writes_those_of_the_disk_once(tmp_path) -> None:
    folder = saved(made(), tmp_path / "model")
    with pytest.raises(PlanError) as caught:
        inference.load(Model, folder, placement="disk", dtype=torch.float64)
    assert caught.value.code == "placement-folder"
    model = inference.load(
        Model, folder, placement={"": "disk", "head": "cpu"}, dtype=torch.float64, offload_folder=tmp_path / "offload"
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert model.offset.dtype == torch.float64 and model.scale.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), made().double()(IDS))
    assert len(list((tmp_path / "offload").iterdir())) == 6


def test_the_dtype_is_that_of_the_files(tmp_path) -> None:
    folder = saved(made().bfloat16(), tmp_path / "model")
    model = inference.load(Model, folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    facts = inference.plan(Model, folder).facts
    assert facts.itemsize == 2


@pytest.mark.parametrize("how", ["meta", "values"])
def test_a_model_may_be_given_in_place_of_a_function(how: str, tmp_path) -> None:
    plain = made()
    folder = saved(plain, tmp_path / "model")
    model = Model()
    if how == "meta":
        model = Model().to("meta")
        model.register_buffer("scale", torch.full((1,), 2.0), persistent=False)
    model = inference.load(model, folder, placement="disk")
    with torch.no_grad():
        assert torch.equal(model(IDS), plain(IDS))


def test_a_buffer_of_two_modules_stays_one(tmp_path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.first.register_buffer("table", torch.ones(2))
            self.second.register_buffer("table", self.first.table)

    folder = saved(Pair(), tmp_path / "model")
    model = inference.load(Pair, folder)
    assert model.first.table is model.second.table


def test_buffers_without_values_are_refused(tmp_path) -> None:
    folder = saved(made(), tmp_path / "model")
    with torch.device("meta"):
        model = Model()
    with pytest.raises(PrepareError, match="scale") as caught:
        inference.load(model, folder)
    assert caught.value.code == "placement-buffers" and len(caught.value.problems) == 1


def test_another_model_is_refused_before_a_weight_is_read(tmp_path) -> None:
    folder = saved(made(), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"blocks\.4\.up\.weight") as caught:
        inference.load(lambda: Model(num_blocks=5), folder)
    assert caught.value.code == "checkpoint-other-model"
    with pytest.raises(CheckpointError):  # what has no value anywhere cannot be left out
        inference.load(lambda: Model(num_blocks=5), folder, strict=False)
    with pytest.raises(CheckpointError):
        inference.plan(lambda: Model(num_blocks=3), folder)
    placement = inference.plan(lambda: Model(num_blocks=3), folder, strict=False)
    smaller = inference.load(lambda: Model(num_blocks=3), folder, placement=placement, strict=False)
    assert smaller(IDS).shape == (1, 3, 20)
    chosen = inference.load(lambda: Model(num_blocks=3), folder, strict=False).placed.placement
    assert chosen.blocks == placement.blocks


def test_a_weight_that_the_files_lack_keeps_its_value_without_strict(tmp_path) -> None:
    plain = made(num_blocks=5)
    folder = saved(made(num_blocks=4), tmp_path / "model")
    given = copy.deepcopy(plain)
    model = inference.load(given, folder, strict=False, placement="disk", offload_folder=tmp_path / "offload")
    assert torch.equal(model.blocks[4].up.weight, plain.blocks[4].up.weight)
    with torch.no_grad():
        assert model(IDS).shape == (1, 3, 20)


def test_an_index_that_names_a_missing_file(tmp_path) -> None:
    folder = tmp_path / "model"
    saved(made(), folder, "cut")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    next(iter(folder.glob("model-00001-*"))).unlink()
    assert index["weight_map"]
    with pytest.raises(CheckpointError, match="model-00001-of") as caught:
        inference.load(Model, folder)
    assert caught.value.code == "checkpoint-missing"


def test_a_file_that_is_cut_short(tmp_path) -> None:
    folder = tmp_path / "model"
    saved(made(), folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError) as caught:
        inference.load(Model, folder, placement="disk")
    assert caught.value.code == "checkpoint-damaged"


def test_an_offload_folder_that_cannot_be_made(tmp_path) -> None:
    folder = saved(made(), tmp_path / "model", "torch")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as caught:
        inference.load(Model, folder, placement="disk", offload_folder=tmp_path / "file" / "folder")
    assert caught.value.code == "checkpoint-not-writable"


@pytest.mark.parametrize("places", [{"": "cuda:7"}, {"": "nonsense"}, {"": 3}])
def test_devices_that_are_not_there(places, tmp_path) -> None:
    folder = saved(made(), tmp_path / "model")
    with pytest.raises(PlanError) as caught:
        inference.load(Model, folder, placement=places)
    assert caught.value.code == "placement-device"


def test_a_placement_for_other_devices_can_be_printed(tmp_path) -> None:
    folder = saved(made(), tmp_path / "model")
    placement = inference.plan(Model, folder, memory={0: "1MB", "cpu": "1GiB"}, workload=inference.Workload(1, 1))
    assert "cuda:0" in placement.explain()
    assert inference.plan(Model, memory={"cpu": "1GiB"}).facts == placement.facts


def test_memory_that_is_no_device_or_no_size() -> None:
    with pytest.raises(PlanError) as caught:
        inference.plan(Model, memory={"gpu zero": 100})
    assert caught.value.code == "placement-device"
    with pytest.raises(CheckpointError) as caught:
        inference.plan(Model, memory={"cpu": "much"})
    assert caught.value.code == "checkpoint-size"


def test_a_placement_is_followed(tmp_path) -> None:
    folder = saved(made(), tmp_path / "model")
    placement = inference.plan(Model, folder, placement={"": "disk"})
    model = inference.load(Model, folder, placement=placement)
    assert model.placed.placement is placement and model.placed.streams


def test_a_model_with_offloaded_weights_is_neither_trained_nor_copied(tmp_path) -> None:
    folder = saved(made(), tmp_path / "model")
    model = inference.load(Model, folder, placement="disk")
    model(IDS)  # in evaluation mode gradients may be on: nothing requires one
    with pytest.raises(TrainError) as caught:
        model.train()(IDS)
    assert caught.value.code == "placement-training"
    model.eval().norm.weight.requires_grad_()
    with pytest.raises(TrainError, match=r"norm\.weight"):
        model(IDS)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PrepareError) as refused:
            attempt(model)
        assert refused.value.code == "placement-copy"


def test_a_model_on_one_device_is_an_ordinary_one(tmp_path) -> None:
    folder = saved(made(), tmp_path / "model")
    model = inference.load(Model, folder)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(IDS), model(IDS)) and other.placed.model is other
    model.train()(IDS).sum().backward()
    assert model.norm.weight.grad is not None


def test_nothing_is_allocated_for_the_weights_of_a_function() -> None:
    with inference.empty_weights():
        model = Model(tied=True)
        assert nn.Linear(1 << 10, 1 << 10).weight.is_meta
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.embedding.weight
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert not nn.Linear(2, 2).weight.is_meta


def test_inputs_move_to_the_device_of_each_block() -> None:
    # The meta device stands for a second one: what is there has a shape, and cannot come back.
    model = made().requires_grad_(False)
    blocks = []
    for block in inference.placement_facts(model).blocks:
        device = "meta" if block.name in ("blocks.2", "blocks.3") else "cpu"
        blocks.append(PlacedBlock(block, device, device))
    model.blocks[2:].to("meta")
    devices = []
    for index in range(4):
        model.blocks[index].register_forward_pre_hook(
            lambda module, args, kwargs: devices.append((args[0].device.type, kwargs["extra"].device.type)),
            with_kwargs=True,
        )
    handle = inference.PlacedModel(model, inference.Placement(inference.placement_facts(model), tuple(blocks)))
    with pytest.raises(NotImplementedError, match="meta"):
        model(IDS)
    assert devices == [("cpu", "cpu")] * 2 + [("meta", "meta")] * 2
    handle.remove()


def test_a_checkpoint_of_one_tensor_file(tmp_path) -> None:
    plain = nn.Sequential(nn.Linear(2, 2)).eval()
    save_file(plain.state_dict(), tmp_path / "weights.safetensors")
    model = inference.load(lambda: nn.Sequential(nn.Linear(2, 2)), tmp_path / "weights.safetensors", placement="disk")
    assert torch.equal(model(torch.ones(1, 2)), plain(torch.ones(1, 2)))


def test_files_in_the_page_cache_of_a_container_are_free_memory(tmp_path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 100\nfile 800\nactive_file 100\ninactive_file 700\n")
    assert _free_on_host(tmp_path) == 800
    (tmp_path / "memory.max").write_text("max\n")
    assert _free_on_host(tmp_path) > 1000


def test_rates_are_measured(tmp_path) -> None:
    saved(made(), tmp_path / "model")
    rates = inference.measure_rates("cpu", tmp_path / "model" / "model.safetensors")
    assert rates.source == "measured" and min(rates.memory, rates.copy, rates.disk) > 1e6


class Recorded(dict):
    """A mapping that counts how often each value is asked for."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__(values)
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked.append(name)
        return super().__getitem__(name)


def test_any_mapping_of_weights_can_be_placed() -> None:
    plain = made(tied=True)
    weights = Recorded({name: value.detach().clone() for name, value in plain.named_parameters()})
    with inference.empty_weights():
        model = Model(tied=True).eval()
    model.offset.copy_(plain.offset)
    facts = inference.placement_facts(model)
    placed = inference.place(model, inference.placement_from_map(facts, {"": "disk", "norm": "cpu"}), weights)
    assert sorted(weights.asked) == sorted(weights)
    assert model.head.weight.data_ptr() == dict.__getitem__(weights, "embedding.weight").data_ptr()
    with torch.no_grad():
        assert torch.equal(model(IDS), plain(IDS))
    placed.remove()


def test_a_model_with_values_is_placed_where_it_is() -> None:
    model, plain = made(), made()
    placement = inference.plan(model, placement={"": "cpu"})
    assert inference.place(model, placement).placement is placement
    assert torch.equal(model(IDS), plain(IDS)) and model.norm.weight.requires_grad


def test_weights_without_a_value_are_named_all_at_once() -> None:
    with inference.empty_weights():
        model = Model(num_blocks=1)
    placement = inference.plan(model, placement={"": "cpu"})
    with pytest.raises(PlanError, match=r"blocks\.0\.up\.weight") as caught:
        inference.place(model, placement, {"embedding.weight": torch.zeros(20, 16)})
    assert {problem.code for problem in caught.value.problems} == {"placement-values"}
    assert len(caught.value.problems) == 7


def test_arguments_that_are_mixed_up_are_named_all_at_once(tmp_path) -> None:
    folder = saved(made(), tmp_path / "model")
    with pytest.raises(PlanError, match="the weights come second") as caught:
        inference.load(folder, Model, memory=10_000_000, dtype="bfloat16")
    assert [problem.code for problem in caught.value.problems] == ["placement-argument"] * 3


def test_a_plan_changes_nothing_and_one_of_another_model_is_refused(tmp_path) -> None:
    model, plain = made(), made()
    folder = saved(made().bfloat16(), tmp_path / "model")
    placement = inference.plan(model, folder)
    assert placement.facts.itemsize == 2
    assert torch.equal(model(IDS), plain(IDS))
    with pytest.raises(PlanError, match=r"blocks\.4\.down\.bias") as caught:
        inference.load(Model, folder, placement=inference.plan(Model(num_blocks=5)))
    assert caught.value.code == "placement-name"


class WithHead(nn.Module):
    """As models of transformers are: it says under which name the model without a head is."""

    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.body = Model()
        self.top = nn.Linear(20, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.body(ids))


@pytest.mark.parametrize("placement", ["cpu", "disk"])
def test_files_of_the_model_without_its_head(placement: str, tmp_path) -> None:
    plain = made()
    folder = saved(plain, tmp_path / "body")
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: top\.weight"):
        inference.load(WithHead, folder, placement=placement)
    model = inference.load(WithHead(), folder, placement={"": placement, "top": "cpu"}, strict=False)
    with torch.no_grad():
        assert torch.equal(model(IDS), model.top(plain(IDS)))

    whole = saved(WithHead(), tmp_path / "whole")
    body = Model()
    body.base_model_prefix = "body"
    body = inference.load(body, whole, placement=placement, strict=False)
    with torch.no_grad():
        assert body(IDS).shape == (1, 3, 20)


def test_weights_of_a_distributed_checkpoint_are_written_once(tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    plain = made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that no process group is up
        dcp.save({"model": plain.state_dict()}, checkpoint_id=str(tmp_path / "model"))
    with pytest.raises(PlanError, match="not in the safetensors format") as caught:
        inference.load(Model, tmp_path / "model", placement="disk")
    assert caught.value.code == "placement-folder"
    places = {"": "cpu", "blocks": "disk"}
    model = inference.load(Model, tmp_path / "model", placement=places, offload_folder=tmp_path / "offload")
    with torch.no_grad():
        assert torch.equal(model(IDS), plain(IDS))
    assert len(list((tmp_path / "offload").iterdir())) == 4
