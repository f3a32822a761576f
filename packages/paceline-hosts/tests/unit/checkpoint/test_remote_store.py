"""Stores behind a URL: a checkpoint is there when its manifest is, whatever ends a save; what is refused, and how soon."""

import io
import os
import random
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from free_ports import free_port
from killed_saves import Killed
from s3_server import Wire, at_endpoint, filesystem
from torch import nn
from warm_python import executable

from paceline.base.errors import CheckpointError
from paceline.checkpoint import Checkpointer, TrainState, verify
from paceline.checkpoint.format import manifest, native_writer
from paceline.checkpoint.store import claim, store_for
from paceline_hosts.stores import objects, remote_files
from paceline_hosts.stores.remote import RemoteStore


def state(value: float, size: int = 2) -> TrainState:
    model = nn.Linear(size, size)
    nn.init.constant_(model.weight, value)
    return TrainState(models={"m": model})


def value_of(folder, size: int = 2) -> float:
    loaded = state(-1.0, size)
    Checkpointer().load(folder, loaded)
    return loaded.models["m"].weight[0, 0].item()


def saves_in(url) -> set[str]:
    """Folders of saves that objects lie in."""
    return {part for name in RemoteStore().files(url) for part in name.split("/") if part.startswith("save-")}


@pytest.fixture(params=["s3", "memory"])
def place(request):
    """A prefix of each of two stores: one with requests and parts, one without."""
    if request.param == "s3":
        yield request.getfixturevalue("s3") + "/project"
        return
    import fsspec

    yield "memory://project"
    fsspec.filesystem("memory").store.clear()


def test_names_and_listings(place) -> None:
    store = store_for(place)
    assert store.resolve(f"{place}//") == place and store.join(place, "a", "b") == f"{place}/a/b"
    assert store.parent(f"{place}/a") == (place, "a")
    root = place.removesuffix("/project") if place.startswith("s3") else place
    assert store.parent(root) == (root, "")
    assert (
        store.list(f"{place}/none") == [] and store.files(f"{place}/none") == {} and not store.exists(f"{place}/none")
    )
    for name in ("one/a", "one/b/c", "one_more"):
        with store.open(f"{place}/{name}", "wb") as file:
            file.write(name.encode())
    assert store.list(place) == ["one", "one_more"] and store.list(f"{place}/one_more") == []
    assert store.files(f"{place}/one") == {"a": 5, "b/c": 7} and store.files(f"{place}/one_more") == {}
    assert store.folder(f"{place}/one") and not store.folder(f"{place}/one_more") and store.exists(f"{place}/one_more")
    store.remove(f"{place}/one")
    assert store.files(place) == {"one_more": 8}, "a name that begins alike stays"
    store.remove(f"{place}/one_more")
    assert store.files(place) == {}
    with pytest.raises(FileNotFoundError):
        store.open(f"{place}/one_more", "rb")


def test_an_overwritten_checkpoint_leaves_one_save_and_foreign_files(place) -> None:
    store = store_for(place)
    folder = Checkpointer().save(f"{place}/c", state(1.0))
    with store.open(f"{folder}/notes.txt", "wb") as file:
        file.write(b"of mine")
    first = saves_in(folder)
    assert Checkpointer().save(folder, state(2.0)) == folder and value_of(folder) == 2.0
    assert len(saves_in(folder)) == 1 and saves_in(folder) != first
    assert store.list(folder)[:2] == ["manifest.json", "notes.txt"] and store.list(place) == ["c"]
    assert verify(folder, store) == []


def test_over_a_checkpoint_that_was_copied_there(place, tmp_path) -> None:
    """Copied up from a disk its files lie beside the manifest; copied down to one, ours are found where it says."""
    store, local = store_for(place), store_for(tmp_path)
    _copy(local, Checkpointer().save(tmp_path / "c", state(1.0)), store, f"{place}/c")
    assert value_of(f"{place}/c") == 1.0
    Checkpointer().save(f"{place}/c", state(2.0))
    assert [name for name in store.list(f"{place}/c") if not name.startswith("save-")] == ["manifest.json"]
    _copy(store, f"{place}/c", local, str(tmp_path / "down"))
    assert value_of(tmp_path / "down") == 2.0
    Checkpointer().save(tmp_path / "down", state(3.0))
    assert value_of(tmp_path / "down") == 3.0 and not any(
        name.startswith("save-") for name in os.listdir(tmp_path / "down")
    )


def _copy(source, folder, target, to) -> None:
    for name in source.files(folder):
        with source.open(source.join(folder, name), "rb") as file, target.open(target.join(to, name), "wb") as out:
            out.write(file.read())


def test_automatic_names_are_pruned_and_a_damaged_one_is_passed_over(place, caplog) -> None:
    from paceline.checkpoint.keep import Keep

    saver = Checkpointer(keep=Keep(last=2))
    paths = [saver.save(saver.next_path(f"{place}/checkpoints"), state(float(number))) for number in range(4)]
    store = store_for(place)
    assert [name for name in store.list(f"{place}/checkpoints") if not name.startswith(".")] == [
        "checkpoint_2",
        "checkpoint_3",
    ]
    assert saver.latest(f"{place}/checkpoints") == paths[3]
    (shard,) = [name for name in store.files(paths[3]) if name.endswith(".distcp")]
    with store.open(f"{paths[3]}/{shard}", "rb") as file:
        content = bytearray(file.read())
    content[len(content) // 2] ^= 1
    with store.open(f"{paths[3]}/{shard}", "wb") as file:
        file.write(content)
    assert saver.latest(f"{place}/checkpoints") == paths[2] and "__0_0.distcp" in caplog.text
    with pytest.raises(CheckpointError, match="checksum") as error:
        value_of(paths[3])
    assert error.value.code == "checkpoint-damaged"
    store.remove(f"{paths[3]}/{shard}")
    assert saver.latest(f"{place}/checkpoints") == paths[2] and value_of(paths[2]) == 2.0
    assert saver.next_path(f"{place}/checkpoints").endswith("checkpoint_4")


@pytest.mark.parametrize("where", [
    (RemoteStore, "stage"), (native_writer, "write_shard"), (native_writer, "write_index"), (manifest.Manifest, "write"),
    (RemoteStore, "publish"), (RemoteStore, "_sweep"), (objects, "delete_all"),
], ids=lambda where: where[1])  # fmt: skip
def test_killed_anywhere(place, kill_at, where, monkeypatch) -> None:
    """Until the manifest is there the old one loads, from then on the new one, and the next save clears up."""
    folder = Checkpointer().save(f"{place}/c", state(1.0))
    with monkeypatch.context(), pytest.raises(Killed):
        kill_at(*where)
        Checkpointer().save(folder, state(2.0))
    monkeypatch.undo()
    assert value_of(folder) == (2.0 if where[1] in ("_sweep", "delete_all") else 1.0)
    Checkpointer().save(folder, state(3.0))
    assert value_of(folder) == 3.0 and len(saves_in(place)) == 1 and store_for(place).list(place) == ["c"]


def test_a_manifest_that_was_taken_and_whose_answer_was_lost(place, monkeypatch) -> None:
    """The save fails, and cannot know that it is published: it must not take away what the manifest names."""
    folder = Checkpointer().save(f"{place}/c", state(1.0))
    original = objects.write

    def write(url, content, **options):
        original(url, content, **options)
        if url == f"{folder}/manifest.json":
            raise CheckpointError("checkpoint-unreachable", "the answer was lost.")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="the answer was lost"):
        patch.setattr(objects, "write", write)
        Checkpointer().save(folder, state(2.0))
    assert value_of(folder) == 2.0
    Checkpointer().save(folder, state(3.0))
    assert value_of(folder) == 3.0 and len(saves_in(place)) == 1


def test_killed_while_removing(place, kill_at, monkeypatch) -> None:
    store = store_for(place)
    folder = Checkpointer().save(f"{place}/checkpoint_0", state(1.0))
    with monkeypatch.context(), pytest.raises(Killed):
        kill_at(objects, "delete_all")
        store.remove(folder)
    monkeypatch.undo()
    assert Checkpointer().latest(place) is None and saves_in(place)
    kept = Checkpointer().save(f"{place}/checkpoint_1", state(2.0))
    assert [name for name in store.list(place) if not name.startswith(".")] == ["checkpoint_1"] and value_of(
        kept
    ) == 2.0


def test_a_save_is_no_checkpoint_before_its_manifest(place, kill_at, monkeypatch) -> None:
    with monkeypatch.context(), pytest.raises(Killed):
        kill_at(native_writer, "write_index")
        Checkpointer().save(f"{place}/c", state(1.0))
    (save,) = saves_in(place)
    assert "__0_0.distcp" in store_for(place).list(f"{place}/c/{save}")
    for path in (f"{place}/c", f"{place}/c/{save}"):
        with pytest.raises(CheckpointError) as error:
            value_of(path)
        assert error.value.code == "checkpoint-none"
    assert Checkpointer().latest(place) is None


def test_a_damaged_manifest_keeps_what_it_may_have_named(place, caplog) -> None:
    store = store_for(place)
    folder = Checkpointer().save(f"{place}/checkpoint_0", state(1.0))
    left = store.stage(folder)
    claim.end(left)
    objects.write(f"{folder}/manifest.json", b"no JSON")
    Checkpointer().save(f"{place}/checkpoint_1", state(2.0))
    assert len(saves_in(folder)) == 1 and store.exists(left) and "is damaged" in caplog.text


# ---------------------------------------------------------------------- uploads that end midway


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of the least size that S3 takes, so that a small model has several."""
    monkeypatch.setattr(remote_files, "PART", 5 << 20)
    monkeypatch.setattr(remote_files, "BLOCK", 1 << 20)


WIDE = 1800  # 13 MB: three parts


def uploads(url) -> int:
    """Uploads in parts that nobody completed."""
    answer = filesystem().call_s3("list_multipart_uploads", Bucket=url.removeprefix("s3://").split("/")[0])
    return len(answer.get("Uploads", []))


def test_an_upload_cut_off_midway(s3, s3_server, small_parts) -> None:
    folder = Checkpointer().save(f"{s3}/c", state(1.0, WIDE))
    wire = Wire(s3_server, 9 << 20)
    with at_endpoint(wire.port):
        began = time.monotonic()
        with pytest.raises(CheckpointError) as error:
            Checkpointer().save(folder, state(2.0, WIDE))
        assert error.value.code == "checkpoint-unreachable" and time.monotonic() - began < 60
        wire.cut()
    with at_endpoint(s3_server):
        assert value_of(folder, WIDE) == 1.0
        assert uploads(s3) == 1, "the store knows of it still, and bills it"
        Checkpointer().save(folder, state(3.0, WIDE))
        assert value_of(folder, WIDE) == 3.0 and len(saves_in(s3)) == 1 and uploads(s3) == 0


CLIENT = """
import os, signal, sys
from torch import nn
from paceline.checkpoint import Checkpointer, TrainState
from paceline.checkpoint.format import native_writer
from paceline_hosts.stores import remote_files
remote_files.PART = 5 << 20
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "manifest":
    native_writer.write_index = die
else:
    remote_files._S3Parts.finish = die
Checkpointer().save(sys.argv[1], TrainState(models={"m": nn.Linear(1800, 1800)}))
"""


@pytest.mark.parametrize("before", ["manifest", "last part"])
def test_a_client_that_is_killed(s3, before, tmp_path) -> None:
    folder = Checkpointer().save(f"{s3}/checkpoint_0", state(1.0, WIDE))
    (tmp_path / "client.py").write_text(CLIENT)
    done = subprocess.run([executable(), tmp_path / "client.py", f"{s3}/checkpoint_1", before], check=False)
    assert done.returncode == -signal.SIGKILL
    saver = Checkpointer()
    assert saver.latest(s3) == folder and value_of(folder, WIDE) == 1.0
    assert uploads(s3) == (before == "last part") and len(saves_in(s3)) == 1 + (before == "manifest")
    saver.save(f"{s3}/checkpoint_2", state(3.0))
    assert uploads(s3) == 0 and len(saves_in(s3)) == 2


def test_parts_and_ranges(s3, small_parts) -> None:
    content = random.Random(0).randbytes((12 << 20) + 7)
    store = store_for(s3)
    with store.open(f"{s3}/file", "wb") as file:
        for start in range(0, len(content), 3 << 20):
            file.write(memoryview(content)[start : start + (3 << 20)])
        assert file.tell() == len(content)
    assert filesystem().info(f"{s3}/file")["ETag"].strip('"').endswith("-3"), "three parts"
    with store.open(f"{s3}/file", "rb") as file:
        assert file.read() == content and file.read(1) == b""
        for start, length in ((5, 10), ((1 << 20) - 3, 6), (len(content) - 4, 100), (3 << 20, 2 << 20)):
            file.seek(start)
            assert file.read(length) == content[start : start + length]
        assert file.seek(-2, io.SEEK_END) == len(content) - 2 and file.read() == content[-2:]
    with store.open(f"{s3}/empty", "wb"):
        pass
    with store.open(f"{s3}/empty", "rb") as file:
        assert file.read() == b""
    with pytest.raises(Killed), store.open(f"{s3}/half", "wb") as file:
        file.write(content)
        raise Killed
    assert not store.exists(f"{s3}/half") and uploads(s3) == 0


# ---------------------------------------------------------------------- what is refused


def refused(code: str, folder: str) -> None:
    """Saving and loading say `code`, within seconds, and write nothing."""
    for use in (lambda: Checkpointer().save(folder, state(1.0)), lambda: value_of(folder)):
        began = time.monotonic()
        with pytest.raises(CheckpointError) as error:
            use()
        assert error.value.code == code and time.monotonic() - began < 30, error.value


def test_no_credentials_wrong_ones_no_bucket_nobody_there(s3, s3_server) -> None:
    with at_endpoint(s3_server, AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None):
        refused("checkpoint-credentials", f"{s3}/c")
    with at_endpoint(s3_server):
        refused("checkpoint-bucket", "s3://nobody-made-this-one/c")
    with at_endpoint(free_port()):
        refused("checkpoint-unreachable", f"{s3}/c")
    with at_endpoint(s3_server):
        assert store_for(s3).files(s3) == {}


def test_a_server_that_takes_a_call_and_says_nothing(s3, monkeypatch) -> None:
    monkeypatch.setattr(objects, "ANSWER_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as mute, at_endpoint(mute.getsockname()[1]):
        with pytest.raises(CheckpointError) as error:
            Checkpointer().save(f"{s3}/c", state(1.0))
        assert error.value.code == "checkpoint-unreachable"


def test_what_a_store_answers_is_told(s3, monkeypatch) -> None:
    from botocore.exceptions import ClientError

    def answer(code):
        async def refusing(*_, **__):
            raise ClientError({"Error": {"Code": code, "Message": "no"}}, "PutObject")

        return refusing

    for said, code in (
        ("SignatureDoesNotMatch", "checkpoint-credentials"),
        ("AccessDenied", "checkpoint-credentials"),
        ("SlowDown", "checkpoint-store-failed"),
        ("QuotaExceeded", "checkpoint-store-failed"),
    ):
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=said) as error:
            patch.setattr(type(filesystem()), "_call_s3", answer(said))
            store_for(s3).stage(f"{s3}/c")
        assert error.value.code == code


def test_urls_that_no_store_takes(monkeypatch) -> None:
    from pathlib import Path

    for path, said in (
        (Path("s3://bucket/run"), "lost a slash"),
        ("nothing://bucket/run", "no store serves"),
        ("gs://bucket/run", "package that is not installed"),
    ):
        with pytest.raises(CheckpointError, match=said) as error:
            Checkpointer().latest(path)
        assert error.value.code == "checkpoint-store"
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CheckpointError, match="`pip install s3fs`"):
        Checkpointer().latest("s3a://bucket/run")


def test_a_url_of_this_machine(tmp_path) -> None:
    folder = Checkpointer().save(f"file://{tmp_path}/c", state(1.0))
    assert folder == str(tmp_path / "c") and value_of(f"file://{folder}") == 1.0


# ---------------------------------------------------------------------- several runs and one prefix


def test_an_automatic_name_is_taken_once(place) -> None:
    store = store_for(place)
    path = f"{place}/checkpoints/checkpoint_0"
    first = store.stage(path, fresh=True)
    with pytest.raises(claim.NameTakenError):
        store.stage(path, fresh=True)
    saver = Checkpointer()
    other = saver.save(saver.next_path(f"{place}/checkpoints"), state(2.0), fresh=True)
    assert other == f"{place}/checkpoints/checkpoint_1"
    store.remove(first)
    assert store.list(f"{place}/checkpoints/.saving") == []
    assert saver.save(path, state(3.0), fresh=True) == f"{place}/checkpoints/checkpoint_2", "there are higher numbers"
    with pytest.raises(claim.NameTakenError):
        store.stage(other, fresh=True)
    assert store.list(f"{place}/checkpoints/.saving") == []


def test_a_store_that_ignores_the_condition(place, monkeypatch) -> None:
    """Both runs take the name. The second one publishes, and the first one is told; no checkpoint is a mix."""
    write = objects.write
    monkeypatch.setattr(objects, "write", lambda url, content, create=False, **options: write(url, content, **options))
    path = f"{place}/checkpoints/checkpoint_0"
    saved = []

    def other_run(folder) -> None:
        if not saved:
            saved.append("")
            saved.append(Checkpointer().save(path, state(2.0), fresh=True))

    with pytest.raises(CheckpointError) as error:
        Checkpointer().save(path, state(1.0), fresh=True, extra_files_hook=other_run)
    assert error.value.code == "checkpoint-store-failed" and "two runs have taken the name" in str(error.value)
    assert saved[1] == path and value_of(path) == 2.0


@pytest.mark.parametrize("age", [0.0, 2 * claim.ABANDONED_S])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_save_of_another_host_is_left_alone_for_a_day(place, monkeypatch, age, fresh) -> None:
    store = store_for(place)
    mine = claim.record()
    elsewhere = {**mine, "process": "another-boot pid:[1] 7", "since": str(time.time() - age)}
    with monkeypatch.context() as patch:
        patch.setattr(claim, "record", lambda: elsewhere)
        staged = store.stage(f"{place}/checkpoints/checkpoint_4", fresh=fresh)
    with store.open(f"{staged}/__0_0.distcp", "wb") as file:
        file.write(b"a part")
    Checkpointer().save(f"{place}/checkpoints/checkpoint_9", state(1.0))
    assert bool(store.list(staged)) == (not age)
    assert bool(store.list(f"{place}/checkpoints/.saving")) == (not age)


def test_what_the_same_launcher_has_started_before_is_abandoned(monkeypatch) -> None:
    elsewhere = {"process": "another-boot pid:[1] 7", "pid": "7", "since": str(time.time()), "run": "this@1.5"}
    assert not claim.is_abandoned("path", elsewhere)
    monkeypatch.setenv("PACELINE_RUN", "this@1.5")
    assert claim.is_abandoned("path", elsewhere) and claim.is_abandoned("path", claim.record())
    assert claim.is_abandoned("path", claim.decoded(b"{")) and claim.is_abandoned("path", claim.decoded(b"[]"))
    assert claim.is_abandoned("path", {**elsewhere, "since": "soon"})


def test_two_saves_into_one_name(place) -> None:
    """Each is complete, and the last one to end stays; the other one's files go with the next save at the latest."""

    def other_run(folder) -> None:
        Checkpointer().save(f"{place}/best", state(2.0))
        assert value_of(f"{place}/best") == 2.0

    Checkpointer().save(f"{place}/best", state(0.0))
    Checkpointer().save(f"{place}/best", state(1.0), extra_files_hook=other_run)
    assert value_of(f"{place}/best") == 1.0 and len(saves_in(place)) == 1


def test_a_model_larger_than_a_block_comes_back_bit_equal(s3, small_parts) -> None:
    torch.manual_seed(0)
    source, target = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
    Checkpointer().save(f"{s3}/c", TrainState(models={"m": source}))
    Checkpointer().load(f"{s3}/c", TrainState(models={"m": target}))
    assert torch.equal(source.weight, target.weight) and torch.equal(source.bias, target.bias)


def test_a_manifest_that_is_replaced_while_it_is_read_is_one_of_the_two(s3, monkeypatch) -> None:
    folder = Checkpointer().save(f"{s3}/c", state(1.0))
    path = f"{folder}/manifest.json"
    size = objects.size

    def replaced_meanwhile(url: str) -> int:
        length = size(url)
        if url == path:
            objects.write(path, b" " * 50 + (objects.read(path) or b""))  # longer, and the same JSON
        return length

    monkeypatch.setattr(objects, "size", replaced_meanwhile)
    assert value_of(folder) == 1.0
