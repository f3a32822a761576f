"""What programs of other people use of accelerate, each beside what accelerate 1.15 does."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections import OrderedDict, namedtuple
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from paceline import DataError
from paceline.testing import run_ranks
from paceline_accelerate.accelerator import Accelerator
from paceline_accelerate.arguments import DataLoaderConfiguration
from paceline_accelerate.errors import CompatValueError
from paceline_accelerate.fsdp_modules import (
    _get_model_state_dict,
    _refuse_recurrent_layers_under_sequence_parallelism,
    _set_model_state_dict,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
)
from paceline_accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from paceline_accelerate.nested import send_to_device
from paceline_accelerate.parallelism_config import ParallelismConfig
from paceline_accelerate.rank_logger import get_logger
from paceline_accelerate.surroundings import save
from paceline_accelerate.wrapping import compile_regions, get_model_tp_size

pytestmark = pytest.mark.usefixtures("fresh_states")


# -- a stateful loader -----------------------------------------------------------------------------------------


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(torch.arange(9.0))


def stateful_accelerator() -> Accelerator:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's constructor calls it
@pytest.mark.parametrize(
    ("dataset", "workers"),
    [(torch.arange(9.0), 0), (torch.arange(9.0), 2), (Stream(), 0)],
    ids=["indexed", "workers", "stream"],
)
def test_a_stateful_loader_and_torchdatas_read_each_others_state(dataset: Any, workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    accelerator = stateful_accelerator()
    loader = accelerator.prepare(DataLoader(dataset, batch_size=2, num_workers=workers))
    assert isinstance(loader, StatefulDataLoader) and isinstance(loader.base_dataloader, StatefulDataLoader)
    batches = iter(loader)
    next(batches), next(batches)
    plain = StatefulDataLoader(dataset, batch_size=2, num_workers=workers)
    plain.load_state_dict(loader.state_dict())
    expected = [[4, 5], [6, 7], [8]]
    assert [batch.tolist() for batch in plain] == expected

    plain_batches = iter(plain)
    next(plain_batches), next(plain_batches)
    other = accelerator.prepare(DataLoader(dataset, batch_size=2, num_workers=workers))
    other.load_state_dict(plain.state_dict())
    assert [batch.tolist() for batch in other] == expected
    assert len(list(other)) == 5, "the next epoch is whole"
    assert other.state_dict()["_iterator_finished"]
    plain.load_state_dict(other.state_dict())
    assert len(list(plain)) == 5


def test_a_state_of_torchdata_is_for_stateful_loaders_alone() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(9.0), batch_size=2))
    with pytest.raises(DataError) as raised:
        loader.load_state_dict({"_num_yielded": 2, "_iterator_finished": False})
    assert raised.value.code == "data-state"
    assert type(loader.base_dataloader) is DataLoader and "_num_yielded" not in loader.state_dict()


# -- the mesh --------------------------------------------------------------------------------------------------


def meshes() -> list[Any]:
    from torch.distributed import device_mesh

    asked = []
    built = ParallelismConfig(dp_shard_size=2)
    mesh = built.build_device_mesh("cpu")
    assert mesh is not None and built.device_mesh is None, "only `get_device_mesh` keeps it"
    assert built.get_device_mesh("cpu") is built.get_device_mesh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch does not like the joined names that accelerate uses
        for name in ("dp", "dp_shard_cp", "dp_cp", "dp_shard"):
            asked.append(mesh[name].mesh.tolist())
    assert ParallelismConfig(sp_size=2).build_device_mesh("cpu") is None, "DeepSpeed makes these groups"

    class Recorded:
        """Stands for torch's mesh, and notes which axes are joined."""

        def __init__(self) -> None:
            self.joined: list[Any] = []

        def __getitem__(self, axes: Any) -> Any:
            return SimpleNamespace(_flatten=lambda name: self.joined.append((name, axes)))

    plain = device_mesh.init_device_mesh
    device_mesh.init_device_mesh = lambda *_, **__: Recorded()  # type: ignore[assignment]
    try:
        recorded: Any = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2).build_device_mesh("cpu")
    finally:
        device_mesh.init_device_mesh = plain
    return [asked, recorded.joined]


def test_the_mesh_is_built_and_joined_by_lists_of_names() -> None:
    joined = [
        ("dp", ["dp_replicate", "dp_shard"]),
        ("dp_shard_cp", ["dp_shard", "cp"]),
        ("dp_cp", ["dp_replicate", "dp_shard", "cp"]),
    ]
    assert run_ranks(meshes, world=2) == [[[[0, 1]] * 4, joined]] * 2


# -- compiled ----------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "a b")
ONES = torch.ones(2)


@pytest.mark.parametrize(
    "value",
    [ONES, [ONES, 1], (ONES, "x"), {"a": ONES, "b": [ONES]}, {1, 2}, None, Pair(ONES, 2)],
    ids=["tensor", "list", "tuple", "dict", "set", "none", "namedtuple"],
)
def test_batches_are_moved_inside_a_compiled_function(value: Any) -> None:
    torch._dynamo.reset()
    move = torch.compile(lambda batch: send_to_device(batch, "meta"), fullgraph=True, backend="eager")
    moved = move(value)
    assert type(moved) is type(value) and str(moved) == str(send_to_device(value, "meta"))


def test_some_keys_stay_inside_a_compiled_function() -> None:
    moved = torch.compile(lambda batch: send_to_device(batch, "meta", skip_keys="a"), fullgraph=True, backend="eager")(
        {"a": ONES, "b": ONES}
    )
    assert moved["a"].device.type == "cpu" and moved["b"].is_meta


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_methods_that_are_set_on_a_module_run_its_compiled_blocks() -> None:
    model = Blocks()
    block = model.blocks[0]
    model.forward = MethodType(lambda self, x: (self, Blocks.forward(self, x)), model)  # type: ignore[method-assign]
    model.of_block = block.forward  # type: ignore[assignment]
    regions = compile_regions(model, backend="eager")
    with torch.no_grad():
        used, result = regions(torch.ones(1, 2))
        assert used is regions and torch.equal(result, model(torch.ones(1, 2))[1])
    assert regions.of_block.__self__ is block and model.forward.__self__ is model  # type: ignore[union-attr]


# -- hooks of modules of torch.fx ----------------------------------------------------------------------------------


class PlusOne(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + 1


def doubled(traced: torch.fx.GraphModule) -> None:
    """Makes the graph return twice its result."""
    (output,) = [node for node in traced.graph.nodes if node.op == "output"]
    with traced.graph.inserting_before(output):
        output.args = (traced.graph.call_function(torch.mul, (output.args[0], 2)),)
    traced.recompile()


def test_a_hooked_graph_can_be_changed() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    x = torch.ones(1, 2)
    plain = traced(x)
    add_hook_to_module(traced, PlusOne())
    assert torch.equal(traced(x), plain + 1)
    doubled(traced)
    assert torch.equal(traced(x), plain * 2 + 1)
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(traced)
    remove_hook_from_module(traced)
    assert torch.equal(traced(x), plain * 2)
    doubled(traced)
    assert torch.equal(traced(x), plain * 4) and "forward" not in vars(traced)
    pickle.dumps(traced)


def test_a_hook_leaves_a_forward_that_was_set_before() -> None:
    model = nn.Linear(2, 2)
    add_hook_to_module(model, PlusOne())
    remove_hook_from_module(model)
    model.forward = lambda x: x  # type: ignore[method-assign]
    add_hook_to_module(model, PlusOne())
    remove_hook_from_module(model)
    assert torch.equal(model(ONES), ONES)


# -- the logger ------------------------------------------------------------------------------------------------------


def test_records_name_the_line_of_the_script(caplog: pytest.LogCaptureFixture) -> None:
    Accelerator(cpu=True)
    with caplog.at_level(
        logging.WARNING
    ):  # puts the root logger's level back, which accelerate's function sets as well
        log = get_logger("mine", "INFO")
        log.info("a")
        log.info("b", main_process_only=False, in_order=True)
        log.warning_once("c")
        log.info("d", stacklevel=2)  # the logger's own default, as under accelerate
    places = {(record.filename, record.funcName) for record in caplog.records if record.name == "mine"}
    assert places == {("test_others_use.py", "test_records_name_the_line_of_the_script")}


# -- states ------------------------------------------------------------------------------------------------------------


def test_the_state_of_a_model_is_saved_with_tied_weights_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Accelerator(cpu=True)
    tied = torch.arange(6.0)
    state = OrderedDict(a=tied, b=tied, c=tied[:3])
    with caplog.at_level(logging.WARNING):
        save(state, tmp_path / "x.safetensors", safe_serialization=True)
    assert set(load_file(tmp_path / "x.safetensors")) == {"a", "c"}, "a part of a weight is no copy of it"
    assert any(record.levelno == logging.WARNING and "b" in record.getMessage() for record in caplog.records)


def test_the_tp_size_of_a_model() -> None:
    def model(**attributes: Any) -> Any:
        module = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(module, name, value)
        return module

    def config(distributed: Any) -> Any:
        return model(tp_size=None, config=SimpleNamespace(distributed_config=distributed))

    models = [model(), model(tp_size=2), config({"tp_size": 3}), config(SimpleNamespace(tp_size=4)), config(None)]
    assert [get_model_tp_size(each) for each in models] == [None, 2, 3, 4, None]


def test_states_by_private_names_of_libraries() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for options in (None, StateDictOptions(full_state_dict=True)):
        _set_model_state_dict(other, _get_model_state_dict(model, sd_options=options), sd_options=options)
        assert torch.equal(model.weight, other.weight)
        nn.init.zeros_(other.weight)


def test_layers_for_8_bits() -> None:
    model = nn.Sequential(*[nn.Linear(16, size) for size in (16, 16, 8, 16)])
    ends = find_first_last_linear_layers(model)
    assert ends == ("0", "3") and find_first_last_linear_layers(nn.ReLU()) == (None, None)
    kept = [name for name, module in model.named_modules() if name and filter_linear_layers(module, name, ends)]
    assert kept == ["1"], "the sizes of layer 2 are no multiples of 16"
    assert filter_first_and_last_linear_layers(model, "1") and not filter_first_and_last_linear_layers(model, "3")


def test_recurrent_layers_are_refused_under_sp() -> None:
    model: Any = nn.Linear(2, 2)
    _refuse_recurrent_layers_under_sequence_parallelism(model)
    model.config = SimpleNamespace(layer_types=["full_attention", "linear_attention"])
    with pytest.raises(CompatValueError) as raised:
        _refuse_recurrent_layers_under_sequence_parallelism(model)
    assert raised.value.code == "compat-argument"
