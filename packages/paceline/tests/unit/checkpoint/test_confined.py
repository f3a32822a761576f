"""What a file names is read within its own folder alone, and links that lie where our files belong are never followed."""

import json
import os

import pytest
from torch import nn

from paceline.base.errors import CheckpointError
from paceline.checkpoint import Checkpointer, RunState, TrainState, load_model, save_model
from paceline.checkpoint.weights.opening import open_weights

OUTSIDE = ["../secret.safetensors", "/secret.safetensors", "a/../../secret.safetensors", "..", ".", "", "a\0b", 7]


@pytest.fixture
def secret(tmp_path):
    """Weights beside the folder, which nothing in the folder may reach."""
    save_model(nn.Linear(2, 1), tmp_path)
    path = tmp_path / "secret.safetensors"
    (tmp_path / "model.safetensors").rename(path)
    return path


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("stem", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_that_names_another_folder(tmp_path, secret, name, stem):
    folder = tmp_path / "model"
    folder.mkdir()
    # A file of the last part's name lies here too: it is not what the index names.
    (folder / "secret.safetensors").write_bytes(secret.read_bytes())
    target = str(secret) if name == "/secret.safetensors" else name
    (folder / f"{stem}.index.json").write_text(json.dumps({"weight_map": {"weight": target, "bias": target}}))
    with pytest.raises(CheckpointError) as caught:
        load_model(nn.Linear(2, 1), folder)
    assert caught.value.code == ("checkpoint-unsafe" if isinstance(name, str) else "checkpoint-missing")


def test_a_linked_file_as_in_a_cache_is_read(tmp_path, secret):
    folder = tmp_path / "snapshots"
    folder.mkdir()
    (folder / "part.safetensors").symlink_to("../secret.safetensors")
    index = {"weight_map": {"weight": "part.safetensors", "bias": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load_model(nn.Linear(2, 1), folder)


def test_a_file_in_a_folder_below_is_read(tmp_path, secret):
    (tmp_path / "model" / "parts").mkdir(parents=True)
    secret.rename(tmp_path / "model" / "parts" / "1.safetensors")
    index = {"weight_map": {"weight": "parts/1.safetensors", "bias": "parts/1.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    load_model(nn.Linear(2, 1), tmp_path / "model")


@pytest.mark.parametrize("tag", [b"../other", b"/etc", b"", b"\xff\xfe\x00", b"a\n/etc"])
def test_a_file_latest_that_names_another_folder(tmp_path, tag):
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    save_model(nn.Linear(2, 1), other)
    (folder / "latest").write_bytes(tag)
    with pytest.raises(CheckpointError) as caught:
        load_model(nn.Linear(2, 1), folder)
    assert caught.value.code in ("checkpoint-unsafe", "checkpoint-missing")


def test_an_index_of_torchs_that_names_another_folder(tmp_path):
    """`.metadata` of a folder without a manifest: nothing else lists its files."""
    Checkpointer().save(tmp_path / "saved", TrainState(models={"model": nn.Linear(2, 1)}, run=RunState(1)))
    folder = tmp_path / "folder"
    folder.mkdir()
    index = (tmp_path / "saved" / ".metadata").read_bytes()
    name = b"__0_0.distcp"
    (tmp_path / "__0.distcp").write_bytes((tmp_path / "saved" / "__0_0.distcp").read_bytes())
    outside = b"../__0.distc"
    assert len(outside) == len(name) and name in index
    (folder / ".metadata").write_bytes(index.replace(name, outside))
    weights = open_weights(folder)
    with pytest.raises(CheckpointError) as caught:
        weights.read("models/model/bias", (slice(0, 1),))
    assert caught.value.code == "checkpoint-unsafe"


def state(step: int) -> TrainState:
    return TrainState(models={"model": nn.Linear(2, 1)}, run=RunState(step))


@pytest.mark.parametrize("kind", ["folder", "checkpoint", "file", "dangling"])
def test_a_link_named_as_a_partial_folder(tmp_path, kind):
    """It used to make each save fail; of one to a checkpoint, foreign files were moved out."""
    victim = tmp_path / "victim"
    if kind == "checkpoint":
        Checkpointer().save(victim, state(1))
    elif kind != "dangling":
        victim.mkdir()
    if kind != "dangling":
        (victim / "notes.txt").write_text("mine")
    folder = tmp_path / "checkpoints"
    Checkpointer().save(folder / "checkpoint_0", state(1))
    left = folder / ".checkpoint_0.partial-00ff"
    if kind == "file":
        left.write_text("left")
    else:
        left.symlink_to(victim)
    Checkpointer().save(folder / "checkpoint_0", state(2))
    assert not os.path.lexists(left)
    if kind in ("folder", "checkpoint"):
        assert (victim / "notes.txt").read_text() == "mine"
        assert not (folder / "checkpoint_0" / "notes.txt").exists()


def test_a_linked_folder_in_a_checkpoint_that_is_replaced(tmp_path):
    """Files that belong to no checkpoint move along; what lies behind a link stays where it is."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "notes.txt").write_text("mine")
    home = tmp_path / "home"
    Checkpointer().save(home, state(1))
    (home / "link").symlink_to(victim)
    (home / "gone").symlink_to(tmp_path / "gone")
    Checkpointer().save(home, state(2))
    assert (home / "link").is_symlink() and (victim / "notes.txt").read_text() == "mine"
    restored = state(0)
    Checkpointer().load(home, restored)
    assert restored.run.step == 2
