"""Models under Hugging Face's names, and single objects."""

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.base.errors import CheckpointError
from paceline.checkpoint import load_model, load_object, parse_size, save_model, save_object


def failing(code: str, call, *args, **keywords) -> str:
    with pytest.raises(CheckpointError) as caught:
        call(*args, **keywords)
    assert caught.value.code == code
    return str(caught.value)


class Tied(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight


def equal(one: nn.Module, two: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    return all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.parametrize(("text", "size"), [
    ("10GB", 10**10), ("512MiB", 2**29), ("1.5kb", 1500), (7, 7), (" 3 tb ", 3 * 10**12), ("9", 9), ("20B", 20), ("2K", 2000),
])  # fmt: skip
def test_sizes(text, size) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["10 apples", "", "-1GB", 0, "GB", "0MB", 2.5])
def test_sizes_that_are_none(text) -> None:
    assert repr(text) in failing("checkpoint-size", parse_size, text)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", "170B"])
def test_round_trip(tmp_path, safe, size) -> None:
    model, other = Tied(), Tied()
    files = save_model(model, tmp_path / "m", size, safe)
    ending = "safetensors" if safe else "bin"
    stem = "model" if safe else "pytorch_model"
    if size == "10GB":
        assert files == [f"{stem}.{ending}"]
    else:
        assert files == [
            f"{stem}-00001-of-00002.{ending}",
            f"{stem}-00002-of-00002.{ending}",
            f"{stem}.{ending}.index.json",
        ]
        index = json.loads((tmp_path / "m" / files[-1]).read_text())
        assert index["metadata"]["total_size"] == 160 + 4 * 16 + 8
        assert index["weight_map"]["embed.weight"] == files[0] and "head.weight" not in index["weight_map"]
    assert sorted(os.listdir(tmp_path / "m")) == sorted(files)
    assert load_model(other, tmp_path / "m") == () and equal(model, other)
    assert other.head.weight is other.embed.weight


def test_safetensors_is_readable_by_others(tmp_path) -> None:
    model = Tied()
    save_model(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["embed.weight"], model.embed.weight) and "head.weight" not in found


def test_a_tied_weight_under_its_other_name(tmp_path) -> None:
    model, other = Tied(), Tied()
    state = {name: value for name, value in model.state_dict().items() if name != "embed.weight"}
    save_model(model, tmp_path, state_dict=state)
    load_model(other, tmp_path)
    assert equal(model, other)


def test_gathered_weights_with_ties_and_views(tmp_path) -> None:
    whole = torch.arange(12.0)
    state = {
        "a": whole[:4],
        "b": whole[4:].view(2, 4),
        "tied": whole[:4],
        "empty": torch.empty(0),
        "e2": torch.empty(0),
    }
    save_model(nn.Linear(1, 1), tmp_path, state_dict=state)
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == {"a", "b", "empty", "e2"} and torch.equal(found["b"], whole[4:].view(2, 4))
    assert (tmp_path / "model.safetensors").stat().st_size < 600


def test_an_earlier_save_goes_and_foreign_files_stay(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_model(Tied(), tmp_path, "170B")
    save_model(Tied(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_wrapped_and_compiled_names(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    save_model(nn.DataParallel(model), tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.weight", "0.bias"}


def test_misfits(tmp_path) -> None:
    save_model(Tied(), tmp_path)
    text = failing("checkpoint-other-model", load_model, Tied(width=5), tmp_path)
    assert "embed.weight: (10, 4) there, (10, 5) here" in text
    other = nn.Sequential()
    other.add_module("embd", nn.Embedding(10, 4))
    assert "embd.weight (10, 4) (closest: embed.weight)" in failing(
        "checkpoint-other-model", load_model, other, tmp_path
    )
    assert "embd.weight" in load_model(other, tmp_path, strict=False)


class WithExtra(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state) -> None:
        self.extra = state


def test_extra_state_is_no_tensor(tmp_path) -> None:
    assert "_extra_state is a dict" in failing("checkpoint-value", save_model, WithExtra(1, 1), tmp_path)


def test_missing_and_damaged(tmp_path) -> None:
    assert "no such folder" in failing("checkpoint-missing", load_model, Tied(), tmp_path / "none")
    (tmp_path / "other").write_text("")
    assert "found: other" in failing("checkpoint-missing", load_model, Tied(), tmp_path)
    for safe, name in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
        save_model(Tied(), tmp_path / name, safe_serialization=safe)
        path = tmp_path / name / name
        path.write_bytes(path.read_bytes()[:-40])
        assert f"it has {path.stat().st_size} bytes" in failing("checkpoint-damaged", load_model, Tied(), path.parent)
    save_model(Tied(), tmp_path / "cut", "170B")
    (tmp_path / "cut/model-00002-of-00002.safetensors").unlink()
    failing("checkpoint-missing", load_model, Tied(), tmp_path / "cut")
    save_object([1], tmp_path / "list.bin")
    assert "a list" in failing("checkpoint-damaged", load_model, Tied(), tmp_path / "list.bin")


def test_objects(tmp_path) -> None:
    path = tmp_path / "object.pt"
    save_object({"a": torch.ones(2), "b": [1, "x"]}, path)
    found = load_object(path)
    assert torch.equal(found["a"], torch.ones(2)) and found["b"] == [1, "x"]
    save_object({"a": torch.ones(2)}, path, safe_serialization=True)
    assert torch.equal(load_file(path)["a"], load_object(path)["a"])
    assert os.listdir(tmp_path) == ["object.pt"]
    failing("checkpoint-value", save_object, {"a": 1}, path, safe_serialization=True)


def test_objects_that_do_not_load(tmp_path) -> None:
    failing("checkpoint-missing", load_object, tmp_path / "none")
    (tmp_path / "empty").write_bytes(b"")
    failing("checkpoint-damaged", load_object, tmp_path / "empty")
    (tmp_path / "text").write_text("not an object")
    with pytest.raises(CheckpointError):
        load_object(tmp_path / "text")


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harm-was-done",)


def test_an_object_from_elsewhere_runs_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Harmful()}, tmp_path / "a.pt")
    failing("checkpoint-unsafe", load_object, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Harmful(), protocol=2))
    failing("checkpoint-unsafe", load_object, tmp_path / "b.pt")
    assert not (tmp_path / "harm-was-done").exists()


def test_save_makes_the_folder(tmp_path) -> None:
    save_object([1], tmp_path / "a/b/object.pt")
    assert load_object(tmp_path / "a/b/object.pt") == [1]


def test_a_failed_save_keeps_the_old_file(tmp_path) -> None:
    path = tmp_path / "object.pt"
    save_object([1], path)
    with pytest.raises(AttributeError):
        save_object(lambda: 1, path)  # torch.save cannot pickle it
    assert load_object(path) == [1] and os.listdir(tmp_path) == ["object.pt"]
    (tmp_path / "file").write_text("")
    failing("checkpoint-not-writable", save_object, [1], tmp_path / "file/object.pt")
    failing("checkpoint-not-writable", save_model, Tied(), tmp_path / "file")
