"""Layers, partitions and topologies of DeepSpeed's pipelines, on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.base.errors import PacelineError
from paceline.world.layout import Layout
from paceline_deepspeed import partition
from paceline_deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from paceline_deepspeed.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)


class Embedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(5, width), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.table(x) + self.position


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.bias = nn.Embedding(5, width), nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return x @ self.table.weight.T + self.bias


def code_of(build) -> str:
    with pytest.raises(PacelineError) as caught:
        build()
    return caught.value.code


# -- a module on one process ------------------------------------------------------------------------------------


def test_a_module_is_the_sequence_of_its_layers() -> None:
    def layers():
        return [LayerSpec(nn.Linear, 4, 4), torch.relu, nn.Linear(4, 2), lambda x: x * 2]

    torch.manual_seed(1)
    model = PipelineModule(layers(), num_stages=1)
    torch.manual_seed(1)
    # A module in the list is built before the specs are.
    last = nn.Linear(4, 2)
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), last)
    x = torch.randn(3, 4)
    assert torch.equal(model(x), plain(x) * 2)
    assert sorted(model.state_dict()) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert (model.parts, model.num_pipeline_stages(), model.stage_owner(3)) == ([0, 4], 1, 0)
    assert repr(LayerSpec(nn.Linear, 4, out_features=2)) == "LayerSpec(Linear, 4, out_features=2)"
    assert len(model.measure(x)) == 4


def test_seeds_of_layers() -> None:
    """A seed a layer, as numbers of any kind; the script's own draws go on as if nothing had been drawn."""
    import numpy

    seeds: list[int] = []

    def seed(number: int) -> None:
        seeds.append(number)
        torch.manual_seed(number)

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    base = numpy.int64(40)
    specs = [LayerSpec(nn.Linear, 3, 3) for _ in range(2)]
    for method in ("uniform", "parameters", "type:linear"):
        PipelineModule(specs, 1, seed_layers=True, base_seed=base, seed_fn=seed, partition_method=method)
    assert seeds == [40, 41] * 3
    assert torch.equal(torch.rand(2), expected)
    torch.manual_seed(41)
    second = nn.Linear(3, 3)
    model = PipelineModule(specs, 1, seed_layers=True, base_seed=40)
    assert torch.equal(model.get_parameter("1.weight"), second.weight)


def test_tied_layers() -> None:
    one = PipelineModule([TiedLayerSpec("e", nn.Linear, 3, 3), nn.ReLU(), TiedLayerSpec("e", nn.Linear, 3, 3)], 1)
    assert one.get_parameter("0.weight") is one.get_parameter("2.weight")
    assert one.get_parameter("0.bias") is one.get_parameter("2.bias")
    assert len(list(one.parameters())) == 2
    share = {"tied_weight_attr": "table.weight"}
    two = PipelineModule([TiedLayerSpec("e", Embedding, 4, **share), TiedLayerSpec("e", Head, 4, **share)], 1)
    assert two.get_parameter("0.table.weight") is two.get_parameter("1.table.weight")
    assert len(list(two.parameters())) == 3
    assert two(torch.tensor([1, 2])).shape == (2, 5)
    own = nn.Linear(3, 3)
    twice = PipelineModule([own, nn.ReLU(), own], num_stages=1)
    assert twice.get_parameter("2.weight") is own.weight
    wrong = [TiedLayerSpec("e", Embedding, 4), TiedLayerSpec("e", Head, 4)]
    assert code_of(lambda: PipelineModule(wrong, num_stages=1)) == "pipe-tied"


def test_what_is_computed_again() -> None:
    counts = [0, 0, 0]

    def counted(number: int):
        class Counted(nn.Linear):
            def forward(self, x):
                counts[number] += 1
                return super().forward(x)

        return Counted

    kinds = [counted(number) for number in range(3)]
    kinds[2].__name__ = "Other"
    calls: list[int] = []

    def again(function, *inputs):
        calls.append(len(inputs))
        return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)

    model = PipelineModule(
        [LayerSpec(kind, 2, 2) for kind in kinds], 1, activation_checkpoint_interval=2,
        activation_checkpoint_func=again, checkpointable_layers=["Counted"],
    )  # fmt: skip
    model(torch.randn(2, 2)).sum().backward()
    assert (counts, calls) == ([2, 2, 1], [1])
    with torch.no_grad():
        model(torch.randn(2, 2))
    assert calls == [1]


# -- partitions ----------------------------------------------------------------------------------------------------


def test_a_lighter_heaviest_stage_is_told() -> None:
    weights = [1, 1, 1, 6, 1, 1, 1]
    assert partition.lighter(weights, [0, 3, 7]) == partition.lighter(weights, [0, 4, 7]) == ""
    told = partition.lighter(weights, [0, 5, 7])
    assert told.startswith("stages that begin with layers")
    assert "at most 9 instead of 10" in told


@pytest.mark.parametrize(
    ("expression", "expected"), [("linear", [1, 0, 1]), ("^RE", [0, 1, 0]), ("type:x|Linear$", [1, 0, 1])]
)
def test_layers_by_the_names_of_their_classes(expression: str, expected: list[int]) -> None:
    assert partition.matches(f"type:{expression}", ["Linear", "ReLU", "BigLinear"]) == expected


@pytest.mark.parametrize(
    ("layers", "options", "code", "builtin"),
    [
        ([nn.Linear(2, 2)], {}, "pipe-stages", ValueError),
        ([nn.Linear(2, 2)], {"num_stages": 1, "partition_method": "magic"}, "pipe-method", NotImplementedError),
        ([nn.Linear(2, 2)], {"num_stages": 1, "partition_method": "type:("}, "pipe-method", NotImplementedError),
        ([nn.Linear(2, 2)], {"num_stages": 1, "partition_method": "type:conv"}, "pipe-no-layer", ValueError),
        ([3], {"num_stages": 1}, "pipe-layer", TypeError),
        ([nn.Linear], {"num_stages": 1}, "pipe-layer", TypeError),
        ([nn.ReLU()], {"topology": PipeModelDataParallelTopology(1, 2, 1)}, "pipe-topology", ValueError),
    ],
)
def test_modules_that_cannot_be_built(layers, options, code, builtin) -> None:
    assert code_of(lambda: PipelineModule(layers, **options)) == code
    with pytest.raises(builtin):
        PipelineModule(layers, **options)


def test_a_spec_takes_a_class() -> None:
    assert code_of(lambda: LayerSpec(torch.relu)) == "pipe-layer"  # type: ignore[arg-type]


# -- topologies ----------------------------------------------------------------------------------------------------


def test_stages_are_those_of_our_layout() -> None:
    topology, layout = PipeDataParallelTopology(num_pp=3, num_dp=4), Layout(pp=3, replicate=2, shard=2)
    assert topology.world_size() == layout.size() == 12
    for rank in range(12):
        here = topology.get_coord(rank)
        assert (here.pipe, here.data) == (layout.coordinate(rank)["pp"], layout.data_index(rank))
        assert topology.get_rank(pipe=here.pipe, data=here.data) == rank
    assert topology.get_axis_list("pipe", 1) == [4, 5, 6, 7]
    assert topology.get_axis_comm_lists("pipe") == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert topology.get_axis_comm_lists("model") == []


def test_three_axes() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert (topology.get_axis_names(), topology.get_dim("model"), topology.get_dim("expert")) == (
        ["pipe", "data", "model"], 2, 0,
    )  # fmt: skip
    assert [topology.get_rank_repr(rank) for rank in (0, 1)] == ["model_00", "model_01"]
    assert topology.get_rank(pipe=1, data=0, model=1) == 5
    assert topology.filter_match(pipe=0, model=1) == [1, 3]
    with pytest.raises(ValueError, match="does not support slices"):
        topology.get_rank(pipe=1)
    assert code_of(lambda: ProcessTopology(["pipe"], [2, 2])) == "pipe-topology"


def test_a_grid_on_one_process() -> None:
    grid = PipelineParallelGrid(num_stages=1)
    assert (grid.get_stage_id(), grid.get_data_parallel_id(), grid.get_pipe_parallel_world_size()) == (0, 0, 1)
    assert grid.is_first_stage()
    assert grid.is_last_stage()
    assert grid.stage_to_global(0) == grid.get_global_rank() == 0


def test_a_rank_that_there_is_not_has_no_coordinate() -> None:
    with pytest.raises(ValueError, match="no rank 4"):
        ProcessTopology(axes=["data"], dims=[4]).get_coord(4)
