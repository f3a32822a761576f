"""Files of weights as they are written and read piece by piece, by one process."""

import contextlib
import errno
import io
import json
import os
import pickle
import resource
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline import Accelerator
from paceline.base.errors import CheckpointError
from paceline.checkpoint import Checkpointer, TrainState, load_model, save_model
from paceline.checkpoint.format.shards import _IndexReader
from paceline.checkpoint.store import claim
from paceline.checkpoint.weights import export as exporting
from paceline.checkpoint.weights.export import Stored, export_checkpoint, export_weights
from paceline.checkpoint.weights.opening import open_weights
from paceline.checkpoint.weights.weight_files import _NAMES
from paceline.world.arrived import as_bytes


def every_kind() -> dict[str, torch.Tensor]:
    """A tensor of each dtype, odd sizes and shapes, names that sort otherwise than they stand."""
    draw = torch.Generator().manual_seed(1)
    found = {f"z.{name}": torch.randint(0, 2, (3, 5), generator=draw).to(dtype) for dtype, name in _NAMES.items()}
    found |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": torch.randn(4, 6, generator=draw).T}
    return found | {"späte": torch.randn(7, 3, 2, generator=draw), "a": torch.randn(1, generator=draw)}


@pytest.mark.parametrize("turn", [1, 100, 64 << 20])
def test_bytes_are_those_of_the_libraries(turn, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(exporting, "TURN_BYTES", turn)
    monkeypatch.setattr(exporting, "LEAST_TURN_BYTES", 1)
    state = every_kind()
    save_model(nn.Module(), tmp_path, state_dict=state)
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "want", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "want").read_bytes()
    save_model(nn.Module(), tmp_path / "torch", safe_serialization=False, state_dict=state)
    path = tmp_path / "torch" / "pytorch_model.bin"
    assert zipfile.ZipFile(path).testzip() is None
    for mapped in (True, False):
        found = torch.load(path, weights_only=True, mmap=mapped)
        assert list(found) == list(state)
        for name, tensor in state.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name


class Net(nn.Module):
    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 4)
        self.head.weight = self.body[0].weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(fill)


def value(model: nn.Module) -> float:
    values = {float(parameter.detach().mean()) for parameter in model.parameters()}
    assert len(values) == 1, "parts of two models"
    return values.pop()


@pytest.mark.parametrize("fails_at", range(14))
@pytest.mark.parametrize("size", ["80B", "10GB"])
@pytest.mark.parametrize("links", [True, False])
def test_a_reader_never_finds_a_mix(fails_at, size, links, tmp_path, monkeypatch) -> None:
    """A crash at any change of names: the old model is there, or the new one; where names cannot be doubled, perhaps none."""
    save_model(Net(1.0), tmp_path, "80B")
    count = 0

    class Crash(BaseException):
        pass

    def counted(call, allowed=True):
        def step(*args, **keywords):
            nonlocal count
            if not allowed:
                raise OSError(errno.EPERM, "no links here")
            count += 1
            if count == fails_at + 1:
                raise Crash
            return call(*args, **keywords)

        return step

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", counted(os.replace))
        patch.setattr(os, "link", counted(os.link, links))
        patch.setattr(exporting, "discard", lambda store, staged: claim.end(staged))  # as if its process had ended
        with contextlib.suppress(Crash):
            save_model(Net(2.0), tmp_path, size)
    model = Net(0.0)
    try:
        load_model(model, tmp_path)
        assert value(model) in (1.0, 2.0)
    except CheckpointError as error:
        assert not links and error.code == "checkpoint-missing"
    save_model(Net(3.0), tmp_path, "80B")
    load_model(model, tmp_path)
    assert value(model) == 3.0
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_two_exports_into_one_folder_at_once(tmp_path, monkeypatch) -> None:
    """The second one leaves alone what the first has written so far, and the last to end stays."""
    save_model(Net(1.0), tmp_path / "first")
    save_model(Net(2.0), tmp_path / "second")
    monkeypatch.setattr(exporting, "TURN_BYTES", 1)
    monkeypatch.setattr(exporting, "LEAST_TURN_BYTES", 1)
    num_turns = 0

    class Interrupted(Stored):
        def fetch(self, wanted):
            nonlocal num_turns
            num_turns += 1
            if num_turns == 3:
                export_checkpoint(tmp_path / "second", tmp_path / "target")
            return super().fetch(wanted)

    export_weights(Interrupted(open_weights(str(tmp_path / "first"))), tmp_path / "target")
    model = Net(0.0)
    load_model(model, tmp_path / "target")
    assert value(model) == 1.0
    assert os.listdir(tmp_path / "target") == ["model.safetensors"]


def test_a_full_disk_leaves_the_old_export(tmp_path) -> None:
    save_model(Net(1.0), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            save_model(nn.Linear(1000, 1000), tmp_path, "1MB")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.code == "checkpoint-disk-full"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_names_of_an_export_are_on_the_disk_when_it_returns(tmp_path, monkeypatch) -> None:
    """A crash of the host could undo renames of a folder that was not synced after them."""
    synced: list[list[str]] = []
    sync_folder = exporting.sync_folder

    def noting(folder: str) -> None:
        synced.append(sorted(os.listdir(folder)))
        sync_folder(folder)

    monkeypatch.setattr(exporting, "sync_folder", noting)
    save_model(nn.Linear(2, 1), tmp_path)
    assert synced[-1:] == [sorted(os.listdir(tmp_path))]


def test_names_that_wrappers_add(tmp_path) -> None:
    state = Net(1.0).state_dict()
    for number, prefix in enumerate(("module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module.")):
        path = tmp_path / f"{number}.pt"
        torch.save({"epoch": 3, "state_dict": {prefix + name: tensor for name, tensor in state.items()}}, path)
        model = Net()
        assert load_model(model, path) == ()
        assert value(model) == 1.0
    inner = {
        name.replace("body.0.", "body._fsdp_wrapped_module.0._checkpoint_wrapped_module."): t
        for name, t in state.items()
    }
    torch.save(inner, tmp_path / "inner.pt", _use_new_zipfile_serialization=False)
    model = Net()
    load_model(model, tmp_path / "inner.pt")
    assert value(model) == 1.0
    torch.save({"step": 1, "opt": {}}, tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="no dictionary of tensors"):
        load_model(model, tmp_path / "none.pt")


def test_a_model_on_the_meta_device(tmp_path) -> None:
    save_model(Net(1.0), tmp_path)
    with torch.device("meta"):
        model = Net()
    load_model(model, tmp_path)
    assert value(model) == 1.0 and model.head.weight is model.body[0].weight
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    prepared = Accelerator(cpu=True).prepare(model)
    assert value(prepared) == 1.0


def test_from_a_checkpoint(tmp_path) -> None:
    two = TrainState(models={"model": Net(1.0), "model_1": Net(2.0)})
    Checkpointer().save(tmp_path / "two", two)
    with pytest.raises(CheckpointError, match="model, model_1"):
        export_checkpoint(tmp_path / "two", tmp_path / "out")
    for model, want in (("model", 1.0), ("model_1", 2.0)):
        for safe in (True, False):
            names = export_checkpoint(tmp_path / "two", tmp_path / "out", safe_serialization=safe, model=model)
            net = Net()
            load_model(net, tmp_path / "out" / names[0])
            assert value(net) == want
    Checkpointer().save(tmp_path / "one", TrainState(models={"model": Net(4.0)}))
    net = Net()
    load_model(net, tmp_path / "one")
    assert value(net) == 4.0
    with open(tmp_path / "one" / "__0_0.distcp", "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"damaged!")
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(tmp_path / "one", tmp_path / "out")
    assert caught.value.code == "checkpoint-damaged"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_folders_of_the_distributed_format(tmp_path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model.weight": torch.ones(4, 4), "bias": torch.zeros(4)}, checkpoint_id=tmp_path / "d", no_dist=True)
    export_checkpoint(tmp_path / "d", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"model.weight", "bias"}
    assert open_weights(tmp_path / "d").entries["bias"].shape == (4,)


def test_an_index_of_any_python(tmp_path) -> None:
    # Python 3.13, and no other, pickles a path as one of `pathlib._local`.
    for module in ("pathlib", "pathlib._local"):
        pickled = pickle.dumps(tmp_path, protocol=2)
        for own in (b"cpathlib\n", b"cpathlib._local\n"):
            pickled = pickled.replace(own, f"c{module}\n".encode())
        assert _IndexReader(io.BytesIO(pickled)).load() == tmp_path


def test_an_index_names_every_tensor_once(tmp_path) -> None:
    model = Net(1.0)
    names = save_model(model, tmp_path, "80B")
    index = json.loads((tmp_path / names[-1]).read_text())
    assert "head.weight" not in index["weight_map"] and "body.0.weight" in index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for n, t in model.state_dict().items() if n != "head.weight")
