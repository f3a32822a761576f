"""The local store: a folder takes its place at once, foreign files stay, leftovers never load and go."""

import os
import time
from pathlib import Path

import pytest
from killed_saves import Killed
from torch import nn

from paceline.base.errors import CheckpointError
from paceline.checkpoint import Checkpointer, TrainState
from paceline.checkpoint.format import native_writer
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.store import claim, local
from paceline.checkpoint.store.local import LocalStore


def state(value: float) -> TrainState:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return TrainState(models={"m": model})


def value_of(folder) -> float:
    loaded = state(-1.0)
    Checkpointer().load(folder, loaded)
    return loaded.models["m"].weight[0, 0].item()


@pytest.fixture(params=["exchange", "two renames"])
def renames(request, monkeypatch):
    """Both ways to replace a folder: at once, and where the file system cannot."""
    if request.param == "two renames":
        monkeypatch.setattr(local, "_exchange", lambda one, other: False)
    return request.param


def test_replaces_and_keeps_foreign_files(tmp_path, renames) -> None:
    folder = Checkpointer().save(tmp_path / "c", state(1.0), extra_files_hook=lambda f: os.mkdir(f"{f}/mine"))
    (tmp_path / "c/notes.txt").write_text("of mine")
    (tmp_path / "c/logs/deep").mkdir(parents=True)
    (tmp_path / "c/logs/deep/events").write_text("x")
    Checkpointer().save(folder, state(2.0))
    assert value_of(folder) == 2.0
    assert (tmp_path / "c/notes.txt").read_text() == "of mine" and (tmp_path / "c/logs/deep/events").exists()
    assert os.listdir(tmp_path) == ["c"]


def test_foreign_files_among_a_hooks_own(tmp_path, renames) -> None:
    def hook(folder):
        os.mkdir(f"{folder}/unet")
        open(f"{folder}/unet/weights", "w").close()

    folder = Checkpointer().save(tmp_path / "c", state(1.0), extra_files_hook=hook)
    (tmp_path / "c/unet/readme").write_text("of mine")
    Checkpointer().save(folder, state(2.0))
    assert os.listdir(tmp_path / "c/unet") == ["readme"]
    Checkpointer().save(folder, state(3.0), extra_files_hook=hook)
    assert sorted(os.listdir(tmp_path / "c/unet")) == ["readme", "weights"] and value_of(folder) == 3.0


def test_into_a_folder_of_foreign_files(tmp_path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c/notes.txt").write_text("of mine")
    folder = Checkpointer().save(tmp_path / "c", state(1.0))
    assert value_of(folder) == 1.0 and (tmp_path / "c/notes.txt").exists() and os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("place", [
    (native_writer.NativeWriter, "_divide"), (local, "_sync_tree"), (local, "sync_folder"), (LocalStore, "publish"),
])  # fmt: skip
def test_killed_before_the_new_one_stands(tmp_path, kill_at, place, monkeypatch) -> None:
    folder = Checkpointer().save(tmp_path / "c", state(1.0))
    with monkeypatch.context(), pytest.raises(Killed):
        kill_at(*place)
        Checkpointer().save(folder, state(2.0))
    assert value_of(folder) == 1.0
    (left,) = [name for name in os.listdir(tmp_path) if name != "c"]
    assert left.startswith(".c.partial-")
    monkeypatch.undo()
    Checkpointer().save(folder, state(3.0))
    assert value_of(folder) == 3.0 and os.listdir(tmp_path) == ["c"]


def test_killed_between_shards_and_manifest(tmp_path, kill_at, monkeypatch) -> None:
    kill_at(native_writer, "write_index")
    with pytest.raises(Killed):
        Checkpointer().save(tmp_path / "c", state(1.0))
    (left,) = os.listdir(tmp_path)
    assert "__0_0.distcp" in os.listdir(tmp_path / left)
    with pytest.raises(CheckpointError) as error:
        value_of(tmp_path / "c")
    assert error.value.code == "checkpoint-missing"
    with pytest.raises(CheckpointError) as error:
        value_of(tmp_path / left)
    assert error.value.code == "checkpoint-none"
    assert Checkpointer().latest(tmp_path) is None


def test_killed_after_the_exchange(tmp_path, kill_at, monkeypatch, renames) -> None:
    """The new one stands; what was foreign in the old one comes home with the next save."""
    folder = Checkpointer().save(tmp_path / "c", state(1.0))
    (tmp_path / "c/notes.txt").write_text("of mine")
    kill_at(local, "_adopt")
    with pytest.raises(Killed):
        Checkpointer().save(folder, state(2.0))
    assert value_of(folder) == 2.0
    monkeypatch.undo()
    Checkpointer().save(folder, state(3.0))
    assert (tmp_path / "c/notes.txt").read_text() == "of mine" and os.listdir(tmp_path) == ["c"]


def test_killed_between_two_renames(tmp_path, kill_at, monkeypatch) -> None:
    folder = Checkpointer().save(tmp_path / "c", state(1.0))
    monkeypatch.setattr(local, "_exchange", lambda one, other: False)
    kill_at(os, "rename", call=3)  # the first one finds the old checkpoint in its way
    with pytest.raises(Killed):
        Checkpointer().save(folder, state(2.0))
    assert not os.path.exists(folder)
    monkeypatch.undo()
    assert value_of(folder) == 1.0  # a load brings it home
    assert [name.partition("-")[0] for name in sorted(os.listdir(tmp_path))] == [".c.partial", "c"]
    Checkpointer().save(folder, state(3.0))
    assert os.listdir(tmp_path) == ["c"]


def test_killed_while_a_foreign_folder_is_replaced(tmp_path, kill_at, monkeypatch, renames) -> None:
    """The user's files are moved away for a moment; they come home, whoever saves next."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c/notes.txt").write_text("of mine")
    kill_at(local, "_clear")
    with pytest.raises(Killed):
        Checkpointer().save(tmp_path / "c", state(2.0))
    monkeypatch.undo()
    assert value_of(tmp_path / "c") == 2.0
    Checkpointer().save(tmp_path / "other", state(3.0))
    Checkpointer().save(tmp_path / "c", state(3.0))
    assert value_of(tmp_path / "c") == 3.0 and (tmp_path / "c/notes.txt").read_text() == "of mine"
    assert sorted(os.listdir(tmp_path)) == ["c", "other"]


def test_killed_between_two_renames_of_a_foreign_folder(tmp_path, kill_at, monkeypatch) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c/notes.txt").write_text("of mine")
    monkeypatch.setattr(local, "_exchange", lambda one, other: False)
    kill_at(os, "rename", call=3)
    with pytest.raises(Killed):
        Checkpointer().save(tmp_path / "c", state(2.0))
    monkeypatch.undo()
    assert not (tmp_path / "c").exists()
    with pytest.raises(CheckpointError) as error:
        value_of(tmp_path / "c")
    assert error.value.code == "checkpoint-none" and (tmp_path / "c/notes.txt").exists()
    Checkpointer().save(tmp_path / "c", state(3.0))
    assert value_of(tmp_path / "c") == 3.0 and (tmp_path / "c/notes.txt").exists()
    assert os.listdir(tmp_path) == ["c"]


def test_killed_while_pruning(tmp_path, kill_at, monkeypatch) -> None:
    saver = Checkpointer(keep=Keep(1))
    saver.save(tmp_path / "checkpoint_0", state(1.0))
    kill_at(local.shutil, "rmtree")
    with pytest.raises(Killed):
        saver.save(tmp_path / "checkpoint_1", state(2.0))
    monkeypatch.undo()
    assert not (tmp_path / "checkpoint_0").exists() and len(os.listdir(tmp_path)) == 2
    assert Checkpointer().latest(tmp_path) == str(tmp_path / "checkpoint_1")
    Checkpointer().save(tmp_path / "checkpoint_2", state(2.0))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_1", "checkpoint_2"]


def test_pruning_that_is_refused(tmp_path, monkeypatch, caplog) -> None:
    saver = Checkpointer(keep=Keep(1))
    saver.save(tmp_path / "checkpoint_0", state(1.0))

    def refuse(self, path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(LocalStore, "remove", refuse)
    assert saver.save(tmp_path / "checkpoint_1", state(2.0))
    assert "could not remove the old checkpoint" in caplog.text


def test_leftovers_of_others_stay(tmp_path) -> None:
    """Of other names always; of automatic names, while it is not known that nobody writes them any more."""
    old = time.time() - claim.ABANDONED_S - 1
    for name in (".other.partial-00", ".checkpoint_6.partial-00", ".checkpoint_7.partial-00"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
        os.utime(tmp_path / name, (old, old))
    Checkpointer().save(tmp_path / "c", state(1.0))
    assert len(os.listdir(tmp_path)) == 4
    os.utime(tmp_path / ".checkpoint_6.partial-00")
    Checkpointer().save(tmp_path / "checkpoint_8", state(1.0))
    assert sorted(os.listdir(tmp_path)) == [".checkpoint_6.partial-00", ".other.partial-00", "c", "checkpoint_8"]


def test_files_and_removal(tmp_path) -> None:
    store = LocalStore()
    with store.open(str(tmp_path / "a/b/file"), "wb") as file:
        file.write(b"123")
    assert store.files(str(tmp_path)) == {"a/b/file": 3} and store.list(str(tmp_path)) == ["a"]
    with store.open(str(tmp_path / "a/b/file"), "rb") as file:
        assert file.read() == b"123"
    store.remove(str(tmp_path / "a/b/file"))
    store.remove(str(tmp_path / "a"))
    assert store.list(str(tmp_path / "a")) == [] and not store.serves("s3://bucket") and store.serves("a/b")


def test_a_link_to_a_folder_stays_a_link(make_run, tmp_path) -> None:
    run = make_run()
    Checkpointer().save(tmp_path / "far", run.state())
    (tmp_path / "far" / "note.txt").write_text("mine")
    os.symlink(tmp_path / "far", tmp_path / "near")
    run.train(2)
    assert Checkpointer().save(tmp_path / "near", run.state()) == str(tmp_path / "far")
    assert os.path.islink(tmp_path / "near") and sorted(os.listdir(tmp_path)) == ["far", "near"]
    assert Checkpointer().load(tmp_path / "near", run.state()).manifest.step == 2
    assert (tmp_path / "far" / "note.txt").read_text() == "mine"


def test_two_merges_at_once_leave_the_files_of_one(tmp_path, monkeypatch) -> None:
    home = str(tmp_path / "c")

    def merge(content: str) -> None:
        staged = local.STORE.stage(home)
        for name in "ab":
            Path(staged, name).write_text(content)
        local.STORE.merge(staged, home, owned=lambda _: None)

    merge("0")
    replace, calls = os.replace, []

    def replaced(source: str, target: str, **where: int) -> None:
        calls.append(source)
        if len(calls) == 2:
            merge("2")
        replace(source, target, **where)

    with monkeypatch.context():
        monkeypatch.setattr(os, "replace", replaced)
        merge("1")
    assert [(tmp_path / "c" / name).read_text() for name in "ab"] == ["2", "2"]
    assert os.listdir(tmp_path) == ["c"]


def test_a_merge_that_was_suspended_touches_no_file_of_the_next_one(tmp_path) -> None:
    """Between looking which files are older and removing them, and again before a file is moved."""
    home = tmp_path / "c"
    looked: list[str] = []

    def merge(content: str, names: str, then: str = "") -> None:
        staged = local.STORE.stage(str(home))
        for name in names:
            Path(staged, name).write_text(content)

        def owned(folder: str) -> list[str] | None:
            names_there = sorted(name for name in os.listdir(folder) if len(name) == 1)
            looked.append(folder)
            if then and folder == str(home) and looked.count(folder) == 1:
                # Another process brings this merge to its end, and a newer save follows.
                local.STORE.recover(str(tmp_path), lambda _: True, lambda _: None, clean=False)
                merge("newer", then)
            return names_there

        local.STORE.merge(staged, str(home), owned=owned)

    merge("old", "ab")
    looked.clear()
    merge("new", "a", then="ab")
    assert {name: (home / name).read_text() for name in sorted(os.listdir(home))} == {"a": "newer", "b": "newer"}
    assert os.listdir(tmp_path) == ["c"]
