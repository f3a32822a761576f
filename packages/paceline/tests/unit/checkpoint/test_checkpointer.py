"""Saving and loading on one process: exact resume, refusal of what does not fit, nothing lost."""

import copy
import errno
import json
import logging
import os
import pickle
import random
import warnings

import numpy
import pytest
import torch
from torch import nn

from paceline.base.errors import CheckpointError
from paceline.checkpoint import Checkpointer, Manifest, RunState, TrainState, store_for, verify
from paceline.checkpoint.agree import os_problem
from paceline.checkpoint.format.manifest import NAME, encoded, measure
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.store.local import LocalStore


def failing(code: str, call, *args, **keywords) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call(*args, **keywords)
    assert caught.value.code == code
    return caught.value


def draws() -> list[float]:
    """One number from each random stream."""
    return [random.random(), float(numpy.random.rand()), torch.rand(1).item()]


def reseal(folder) -> None:
    """Makes the manifest agree with changed files, as somebody would who means harm."""
    store = LocalStore()
    manifest = Manifest.read(store, str(folder))
    files = {name: measure(store, str(folder / name)) for name in manifest.files}
    text = json.loads((folder / NAME).read_text())
    text["files"] = {name: {"bytes": fact.bytes, "checksum": fact.checksum} for name, fact in files.items()}
    (folder / NAME).write_bytes(encoded(text))


def test_resume_is_exact(make_run, tmp_path) -> None:
    reference = make_run()
    first = reference.train(3)
    path = Checkpointer().save(tmp_path / "c", reference.state(), plan_json='{"precision": "no"}')
    rest = [*reference.train(4), *draws()]

    other = make_run(seed=7)
    other.train(1)
    loaded = Checkpointer().load(path, other.state())
    assert [*other.train(4), *draws()] == rest
    assert other.run.step == 7 and other.custom.count == 14 and len(first) == 3
    for one, two in zip(reference.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    assert loaded.notes == () and loaded.manifest.step == 3 and loaded.manifest.plan == {"precision": "no"}


def test_a_narrowed_state_loads_some_kinds_and_leaves_the_others(make_run, tmp_path) -> None:
    saved = make_run()
    saved.train(3)
    folder = Checkpointer().save(tmp_path / "c", saved.state())
    other = make_run(seed=7)
    other.train(1)
    weights = copy.deepcopy(other.model.state_dict())
    random.seed(11)
    drawn = random.random()
    random.seed(11)

    Checkpointer().load(folder, other.state().narrowed({"optimizers"}))
    assert random.random() == drawn
    for name, weight in other.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    states = zip(saved.optimizer.state.values(), other.optimizer.state.values(), strict=True)
    assert all(torch.equal(mine["exp_avg"], theirs["exp_avg"]) for mine, theirs in states)
    assert other.custom.count != saved.custom.count


def test_optimizer_states_lie_under_parameter_names(make_run, tmp_path) -> None:
    run = make_run()
    run.train(1)
    folder = Checkpointer().save(tmp_path / "c", run.state())
    from paceline.checkpoint.format.shards import read_index

    keys = set(read_index(LocalStore(), folder).state_dict_metadata)
    assert {"models/model/hidden.weight", "optimizers/optimizer/hidden.weight/exp_avg"} <= keys
    assert not any("frozen" in key for key in keys if key.startswith("optimizers/"))
    assert json.loads((tmp_path / "c/state.json").read_text())["optimizers"]["optimizer"]["members"]["frozen.bias"] == 0


def test_order_of_parameters_may_change(make_run, tmp_path) -> None:
    run = make_run()
    run.train(2)
    Checkpointer().save(tmp_path / "c", run.state())
    other = make_run(seed=3)
    parameters = list(other.model.parameters())[::-1]
    other.optimizer = torch.optim.AdamW(parameters, lr=1.0)
    Checkpointer().load(tmp_path / "c", other.state(schedulers={"scheduler": run.scheduler}))
    for one, two in zip(run.model.parameters(), other.model.parameters(), strict=True):
        for key, value in run.optimizer.state[one].items():
            assert torch.equal(value, other.optimizer.state[two][key]), key
    assert other.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]


def test_load_before_the_first_step(make_run, tmp_path) -> None:
    Checkpointer().save(tmp_path / "c", make_run().state())
    run = make_run()
    run.train(1)
    Checkpointer().load(tmp_path / "c", run.state())
    assert not run.optimizer.state


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    lambda p: torch.optim.LBFGS(p, lr=0.1),
    lambda p: torch.optim.Adafactor(p),
    lambda p: torch.optim.Rprop(p),
])  # fmt: skip
def test_optimizers(make, tmp_path) -> None:
    def build():
        model = nn.Linear(3, 2)
        return model, make(model.parameters())

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (model(torch.ones(4, 3)) - 1).square().mean()
            loss.backward()
            return loss.detach()

        return float(optimizer.step(closure))

    model, optimizer = build()
    step(model, optimizer)
    Checkpointer().save(tmp_path / "c", TrainState(models={"m": model}, optimizers={"o": optimizer}))
    expected = [step(model, optimizer) for _ in range(3)]
    model, optimizer = build()
    Checkpointer().load(tmp_path / "c", TrainState(models={"m": model}, optimizers={"o": optimizer}))
    assert [step(model, optimizer) for _ in range(3)] == expected


@pytest.mark.parametrize("build", [
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: torch.optim.lr_scheduler.SequentialLR(o, [
        torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]),
])  # fmt: skip
def test_schedulers(build, tmp_path) -> None:
    def make():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        return optimizer, build(optimizer)

    def rates(optimizer, scheduler):
        found = []
        for _ in range(4):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR's own
        optimizer, scheduler = make()
        rates(optimizer, scheduler)
        Checkpointer().save(tmp_path / "c", TrainState(optimizers={"o": optimizer}, schedulers={"s": scheduler}))
        expected = rates(optimizer, scheduler)
        optimizer, scheduler = make()
        Checkpointer().load(tmp_path / "c", TrainState(optimizers={"o": optimizer}, schedulers={"s": scheduler}))
        assert rates(optimizer, scheduler) == expected


def test_states_in_another_precision_stay_exact(tmp_path) -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["exact"] = torch.full((2, 2), 0.1)
    Checkpointer().save(tmp_path / "c", TrainState(models={"m": model}, optimizers={"o": optimizer}))
    optimizer.state.clear()
    Checkpointer().load(tmp_path / "c", TrainState(models={"m": model}, optimizers={"o": optimizer}))
    assert torch.equal(optimizer.state[model.weight]["exact"], torch.full((2, 2), 0.1))


class Tied(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if tied:
            self.second.weight = self.first.weight

    def get_extra_state(self):
        return {"note": ("kept", 1)}

    def set_extra_state(self, state) -> None:
        self.note = state


def test_tied_parameters_are_saved_once(tmp_path, caplog) -> None:
    model = Tied()
    folder = Checkpointer().save(tmp_path / "c", TrainState(models={"m": model}))
    state = json.loads((tmp_path / "c/state.json").read_text())
    assert state["models"]["m"]["aliases"] == {"second.weight": "first.weight"}

    tied, untied = Tied(), Tied(tied=False)
    Checkpointer().load(folder, TrainState(models={"m": tied}))
    assert tied.second.weight is tied.first.weight and torch.equal(tied.first.weight, model.first.weight)
    assert tied.note == {"note": ("kept", 1)}
    Checkpointer().load(folder, TrainState(models={"m": untied}))
    assert torch.equal(untied.second.weight, model.first.weight)

    two = Checkpointer().save(tmp_path / "two", TrainState(models={"m": Tied(tied=False)}))
    with caplog.at_level(logging.WARNING):
        (note,) = Checkpointer().load(two, TrainState(models={"m": tied})).notes
    assert "second.weight" in note and note in caplog.text


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch.compile's own imports
def test_names_without_wrappers(make_run, tmp_path) -> None:
    run = make_run()
    compiled = torch.compile(run.model)
    compiled.frozen = torch.compile(run.model.frozen)
    Checkpointer().save(tmp_path / "c", TrainState(models={"model": compiled}))
    other = make_run(seed=2)
    Checkpointer().load(tmp_path / "c", TrainState(models={"model": other.model}))
    assert torch.equal(other.model.frozen.weight, run.model.state_dict()["frozen._orig_mod.weight"])


def test_torch_reads_the_tensors(make_run, tmp_path) -> None:
    run = make_run()
    folder = Checkpointer().save(tmp_path / "c", run.state())
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert torch.equal(plain["models/model/out.bias"], run.model.out.bias)


def test_precision_and_scaler_are_said(make_run, tmp_path) -> None:
    run = make_run()
    folder = Checkpointer().save(tmp_path / "c", TrainState(models={"m": run.model}, scaler=run.scaler))
    notes = Checkpointer().load(folder, TrainState(models={"m": make_run().model.half()})).notes
    assert any("another precision" in note for note in notes) and any("loss scale" in note for note in notes)


# ---------------------------------------------------------------- what does not fit


def test_another_model(make_run, tmp_path) -> None:
    folder = Checkpointer().save(tmp_path / "c", make_run().state())
    other = make_run(seed=1, hidden="hiden")
    before = [parameter.clone() for parameter in other.model.parameters()]
    error = failing("checkpoint-other-model", Checkpointer().load, folder, other.state())
    assert len(error.problems) == 1
    assert "2 missing in the checkpoint: hiden.weight (5, 4) (closest: hidden.weight)" in str(error)
    assert "2 only in the checkpoint: hidden." in str(error)
    assert all(torch.equal(one, two) for one, two in zip(before, other.model.parameters(), strict=True))

    error = failing("checkpoint-other-model", Checkpointer().load, folder, make_run(width=6).state())
    assert "hidden.weight: (5, 4) there, (6, 4) here" in str(error)


def test_not_strict_loads_what_agrees(make_run, tmp_path) -> None:
    run = make_run()
    run.train(2)
    folder = Checkpointer().save(tmp_path / "c", run.state())
    other = make_run(seed=1, hidden="hiden")
    notes = Checkpointer().load(folder, other.state(), strict=False).notes
    assert "models/model: 2 names kept their values, 2 of the checkpoint were left out" in notes
    assert torch.equal(other.model.out.weight, run.model.out.weight)
    assert other.model.hiden.weight not in other.optimizer.state
    failing("checkpoint-other-model", Checkpointer().load, folder, make_run(width=6).state(), strict=False)


def test_other_owners(make_run, tmp_path) -> None:
    run = make_run()
    folder = Checkpointer().save(tmp_path / "c", run.state())
    error = failing("checkpoint-owners", Checkpointer().load, folder, run.state(optimizers={}, custom={}))
    assert [problem.what for problem in error.problems] == [
        "the checkpoint holds 1 optimizers, but this run has 0.",
        "the checkpoint holds 1 custom, but this run has 0.",
    ]
    sgd = torch.optim.SGD(run.model.parameters(), lr=0.1)
    error = failing("checkpoint-owners", Checkpointer().load, folder, run.state(optimizers={"optimizer": sgd}))
    assert "was a AdamW in the checkpoint and is a SGD here" in str(error)
    Checkpointer().load(folder, run.state(optimizers={}, custom={}), strict=False)


def test_other_groups(make_run, tmp_path) -> None:
    run = make_run()
    folder = Checkpointer().save(tmp_path / "c", run.state())
    one, *rest = run.model.parameters()
    run.optimizer = torch.optim.AdamW([{"params": [one]}, {"params": rest}])
    failing("checkpoint-groups", Checkpointer().load, folder, run.state())
    folder = Checkpointer().save(tmp_path / "two", run.state())
    run.optimizer = torch.optim.AdamW([{"params": rest}, {"params": [one]}])
    assert "in another group" in str(failing("checkpoint-groups", Checkpointer().load, folder, run.state()))


def test_stateless_object(make_run) -> None:
    error = failing("checkpoint-stateless", make_run().state, custom={"object": object(), "other": 3})
    assert len(error.problems) == 2 and "has no state_dict and no load_state_dict" in str(error)


def test_value_refused_when_saving(make_run, tmp_path) -> None:
    run = make_run()
    folder = Checkpointer().save(tmp_path / "c", run.state())
    before = (tmp_path / "c" / NAME).read_bytes()
    run.custom.count = object()
    error = failing("checkpoint-value", Checkpointer().save, folder, run.state())
    assert "custom/object/count is a builtins.object" in str(error)
    assert (tmp_path / "c" / NAME).read_bytes() == before and os.listdir(tmp_path) == ["c"]


# ---------------------------------------------------------------- what is not there, or not whole


def test_missing_lists_the_automatic_ones_too(make_run, tmp_path) -> None:
    Checkpointer().save(tmp_path / "checkpoints" / "checkpoint_0", make_run().state())
    error = failing("checkpoint-missing", Checkpointer().load, tmp_path / "last", make_run().state())
    assert f"fix: load {tmp_path}/checkpoints/checkpoint_0" in str(error)
    assert error.__cause__ is None  # its words would be printed twice


def test_a_full_disk_names_the_file_within_its_folder() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/runs/a/__1_0.distcp")
    assert os_problem(error, "writing the shards into /runs/a").what == (
        "the disk is full: writing the shards into /runs/a (__1_0.distcp) stopped."
    )


def test_missing_lists_what_lies_near(make_run, tmp_path) -> None:
    for name in ("checkpoint_2", "checkpoint_10"):
        Checkpointer().save(tmp_path / name, make_run().state())
    error = failing("checkpoint-missing", Checkpointer().load, tmp_path / "checkpoint_3", make_run().state())
    assert f"{tmp_path}/checkpoint_2, {tmp_path}/checkpoint_10" in str(error)
    assert f"fix: load {tmp_path}/checkpoint_10" in str(error)
    error = failing("checkpoint-none", Checkpointer().load, tmp_path, make_run().state())
    assert "it holds checkpoint_10, checkpoint_2" in str(error)
    newest = tmp_path / "runs/mine/checkpoints/checkpoint_2"
    newest.parent.mkdir(parents=True)
    (tmp_path / "checkpoint_2").rename(newest)
    error = failing("checkpoint-none", Checkpointer().load, tmp_path / "runs/mine", make_run().state())
    assert f"fix: load {newest}" in str(error)


@pytest.mark.parametrize("name", ["__0_0.distcp", "state.json", ".metadata"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_damaged_file_is_named(make_run, tmp_path, name, damage) -> None:
    folder = Checkpointer().save(tmp_path / "c", make_run().state())
    path = tmp_path / "c" / name
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-3])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    error = failing("checkpoint-damaged", Checkpointer().load, folder, make_run().state())
    expected = {
        "cut": f"should have {len(content)} bytes and has {len(content) - 3}",
        "flip": "crc32:",
        "remove": "missing",
    }
    assert f"{name} of the checkpoint {folder}" in str(error) and expected[damage] in str(error)
    assert len(verify(folder, LocalStore())) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": "other"}', '{"format": "paceline-checkpoint"}'])
def test_damaged_manifest(make_run, tmp_path, text) -> None:
    folder = Checkpointer().save(tmp_path / "c", make_run().state())
    (tmp_path / "c" / NAME).write_text(text)
    failing("checkpoint-damaged", Checkpointer().load, folder, make_run().state())


def test_newer_format(make_run, tmp_path) -> None:
    folder = Checkpointer().save(tmp_path / "c", make_run().state())
    manifest = json.loads((tmp_path / "c" / NAME).read_text())
    (tmp_path / "c" / NAME).write_text(json.dumps({**manifest, "version": 99, "paceline": "9.9"}))
    assert "install Paceline 9.9" in str(failing("checkpoint-newer", Checkpointer().load, folder, make_run().state()))


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harm-was-done",)


def test_a_harmful_index_runs_nothing(make_run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Checkpointer().save(tmp_path / "c", make_run().state())
    (tmp_path / "c/.metadata").write_bytes(pickle.dumps(Harmful()))
    reseal(tmp_path / "c")
    error = failing("checkpoint-unsafe", Checkpointer().load, folder, make_run().state())
    assert "system" in str(error) and not (tmp_path / "harm-was-done").exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"a": 1}), b"\x80\x04K\x01."])
def test_an_index_that_is_none(make_run, tmp_path, content) -> None:
    folder = Checkpointer().save(tmp_path / "c", make_run().state())
    (tmp_path / "c/.metadata").write_bytes(content)
    reseal(tmp_path / "c")
    failing("checkpoint-damaged", Checkpointer().load, folder, make_run().state())


def test_an_index_that_points_outside(make_run, tmp_path) -> None:
    folder = Checkpointer().save(tmp_path / "c", make_run().state())
    path = tmp_path / "c/.metadata"
    index = pickle.loads(path.read_bytes())
    for info in index.storage_data.values():
        info.relative_path = "../secret"
    path.write_bytes(pickle.dumps(index))
    reseal(tmp_path / "c")
    failing("checkpoint-unsafe", Checkpointer().load, folder, make_run().state())


def test_a_harmful_tensor_runs_nothing(make_run, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Checkpointer().save(tmp_path / "c", make_run().state())
    index_path, shard = tmp_path / "c/.metadata", tmp_path / "c/__0_0.distcp"
    torch.save(Harmful(), shard)
    index = pickle.loads(index_path.read_bytes())
    for info in index.storage_data.values():
        info.offset, info.length = 0, shard.stat().st_size
    index_path.write_bytes(pickle.dumps(index))
    reseal(tmp_path / "c")
    failing("checkpoint-unsafe", Checkpointer().load, folder, make_run().state())
    assert not (tmp_path / "harm-was-done").exists()


# ---------------------------------------------------------------- places and names


def test_no_permission(make_run, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    error = failing("checkpoint-not-writable", Checkpointer().save, tmp_path / "file/c", make_run().state())
    assert "a file has the name of the folder, or of one above it" in str(error) and len(error.problems) == 1
    error = failing("checkpoint-not-writable", Checkpointer().save, tmp_path / "file", make_run().state())
    assert "is a file, not a folder" in str(error)

    def refuse(self, path, **options):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(LocalStore, "stage", refuse)
    failing("checkpoint-not-writable", Checkpointer().save, tmp_path / "c", make_run().state())


def test_a_system_error(make_run, tmp_path, monkeypatch) -> None:
    def refuse(self, path, **options):
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(LocalStore, "stage", refuse)
    assert "Input/output error" in str(
        failing("checkpoint-io", Checkpointer().save, tmp_path / "c", make_run().state())
    )


def test_a_folder_that_others_do_not_see(make_run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(LocalStore, "exists", lambda self, path: False)
    failing("checkpoint-not-shared", Checkpointer().save, tmp_path / "c", make_run().state())


def test_a_hook_that_raises(make_run, tmp_path) -> None:
    def hook(folder):
        raise ZeroDivisionError("of mine")

    error = failing("checkpoint-failed", Checkpointer().save, tmp_path / "c", make_run().state(), extra_files_hook=hook)
    assert "rank 0 failed while running the hook" in str(error) and "ZeroDivisionError: of mine" in str(error)
    assert os.listdir(tmp_path) == []


def test_automatic_names_go_on(make_run, tmp_path) -> None:
    checkpointer = Checkpointer(keep=Keep(2))
    root = tmp_path / "checkpoints"
    run = make_run()
    for _ in range(4):
        checkpointer.save(checkpointer.next_path(root), run.state())
    assert sorted(os.listdir(root)) == ["checkpoint_2", "checkpoint_3"]
    (root / "checkpoint_3/state.json").write_text("{}")
    assert Checkpointer().latest(root) == str(root / "checkpoint_2")
    assert Checkpointer().next_path(root) == str(root / "checkpoint_4")
    assert Checkpointer().next_path(root, start=9) == str(root / "checkpoint_9")
    assert Checkpointer().latest(tmp_path / "none") is None


def test_nothing_goes_before_success(make_run, tmp_path) -> None:
    run = make_run()
    checkpointer = Checkpointer(keep=Keep(1))
    checkpointer.save(tmp_path / "checkpoint_0", run.state())
    run.custom.count = object()
    failing("checkpoint-value", checkpointer.save, tmp_path / "checkpoint_1", run.state())
    assert os.listdir(tmp_path) == ["checkpoint_0"]


def test_names_by_hand_are_never_pruned(make_run, tmp_path) -> None:
    checkpointer = Checkpointer(keep=Keep(1))
    for name in ("best", "checkpoint_1", "last"):
        checkpointer.save(tmp_path / name, make_run().state())
    assert sorted(os.listdir(tmp_path)) == ["best", "checkpoint_1", "last"]


def test_keeping_none(tmp_path) -> None:
    failing("checkpoint-keep", Keep, 0)


def test_hook_files_belong_to_the_checkpoint(make_run, tmp_path) -> None:
    def hook(folder):
        os.makedirs(os.path.join(folder, "unet"))
        with open(os.path.join(folder, "unet/config.json"), "w") as file:
            file.write("{}")

    folder = Checkpointer().save(tmp_path / "c", make_run().state(), extra_files_hook=hook)
    assert "unet/config.json" in Manifest.read(LocalStore(), folder).files
    (tmp_path / "c/unet/config.json").write_text("[]")
    failing("checkpoint-damaged", Checkpointer().load, folder, make_run().state())


def test_run_counters() -> None:
    run = RunState(step=3, micro_step=1, extra={"best": 0.5})
    other = RunState()
    other.load_state_dict(run.state_dict())
    assert other == run


def test_no_store_for_a_path() -> None:
    assert isinstance(store_for("some/folder"), LocalStore)
    assert "none://x" in str(failing("checkpoint-store", store_for, "none://x"))


class Packed(nn.Module):
    """Keeps its weight in a form of its own: what it gives is a copy, and what it is given it packs again."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((2,), value))
        self.halves = [value] * 3

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = torch.tensor(self.halves)

    def _load_from_state_dict(self, state, prefix, *rest) -> None:
        self.halves = state.pop(f"{prefix}weight").tolist()
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_module_that_gives_copies(tmp_path) -> None:
    path = Checkpointer().save(tmp_path / "c", TrainState(models={"model": nn.Sequential(Packed(7.0))}))
    model = nn.Sequential(Packed())
    Checkpointer().load(path, TrainState(models={"model": model}))
    assert model[0].halves == [7.0] * 3 and model[0].bias.tolist() == [7.0] * 2


def test_a_module_that_listens_to_loads(tmp_path) -> None:
    """Torch's own way is taken only where somebody listens: it looks at every name once for each module."""
    plain, heard = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), []
    path = Checkpointer().save(tmp_path / "c", TrainState(models={"model": plain}))
    for listens in (False, True):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        if listens:
            model[1].register_load_state_dict_post_hook(lambda module, keys: heard.append(module.running_mean.sum()))
        Checkpointer().load(path, TrainState(models={"model": model}))
        assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert len(heard) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"within": ".."},
        {"within": "a/b"},
        {"files": {"../state.json": {"bytes": 1, "checksum": "crc32:0"}}},
        {"files": {"/etc/hostname": {"bytes": 1, "checksum": "crc32:0"}}},
        {"step": "seven"},
        {"created": None},
        {"metrics": ["loss"]},
        {"metrics": {"loss": "low"}},
    ],
    ids=str,
)
def test_an_edited_manifest(make_run, tmp_path, change) -> None:
    """It names nothing outside of its folder, and its values are of the kinds that others count with."""
    run = make_run()
    path = Checkpointer().save(tmp_path / "checkpoint_1", run.state())
    text = json.loads((tmp_path / "checkpoint_1" / NAME).read_text())
    (tmp_path / "checkpoint_1" / NAME).write_bytes(encoded({**text, **change}))
    failing("checkpoint-damaged", Checkpointer().load, path, run.state())
    assert Checkpointer(keep=Keep(last=1, every=5)).save(tmp_path / "checkpoint_2", run.state())
    assert Checkpointer().latest(tmp_path) == str(tmp_path / "checkpoint_2")


def test_a_narrowed_state_leaves_the_first_as_it_is(make_run) -> None:
    state = make_run().state()
    narrow = state.narrowed({"optimizers", "custom"})
    assert not narrow.models and not narrow.plain["schedulers"] and narrow.scaler is None
    assert narrow.plain["custom"] and state.models and state.plain["schedulers"] and state.scaler is not None
    # The optimizer's parameters keep the names of the model that is left out.
    assert narrow.optimizer_states()["optimizer"].groups == state.optimizer_states()["optimizer"].groups
    assert not narrow.narrowed({"models", "custom"}).optimizers, "what was left out stays out"


def test_a_folder_with_a_manifest_of_ours_is_ours(make_run, tmp_path) -> None:
    """An older save of another library may lie in the same folder."""
    run = make_run()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "random_states_0.pkl").write_bytes(b"not ours")
    run.train(1)
    Checkpointer().save(tmp_path / "c", run.state())
    other = make_run(seed=1)
    assert Checkpointer().load(tmp_path / "c", other.state()).manifest is not None
    assert torch.equal(other.model.out.weight, run.model.out.weight)
