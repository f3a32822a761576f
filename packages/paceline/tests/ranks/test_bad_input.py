"""What goes wrong in a script on several processes: each rank raises the same coded error, at once, and says what helps."""

import os
import pickle
import resource
import shutil
import signal
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator, PacelineError
from paceline.testing import run_ranks


def batches(batch=2):
    return DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 1)), batch)


def prepared(**settings):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **settings)
    model = nn.Linear(4, 1)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches())


def an_unprepared_optimizer():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()


def a_loader_of_an_unknown_kind():
    Accelerator(cpu=True).prepare(iter([1, 2]))


def an_object_of_an_unknown_kind():
    Accelerator(cpu=True).prepare({"train": batches()})


def an_optimizer_of_another_model():
    Accelerator(cpu=True).prepare(nn.Linear(4, 1), torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1))


def torchs_own_backward():
    _, model, optimizer, loader = prepared()
    for x, y in loader:
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()


def a_loss_that_is_not_a_number():
    accelerator, model, optimizer, loader = prepared(mixed_precision="fp16")
    for x, _ in loader:
        accelerator.backward(model(x).mean() * (float("nan") if accelerator.is_last_process else 1.0))
        optimizer.step()


def a_model_without_layers_to_divide():
    accelerator = Accelerator(cpu=True, plan={"tp": 2})
    accelerator.prepare(nn.Linear(4, 1))


def a_model_that_is_divided_already():
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(fully_shard(nn.Linear(4, 2)))


def a_dataset_without_samples():
    list(Accelerator(cpu=True).prepare(DataLoader(TensorDataset(torch.empty(0, 4)), 2)))


def a_copy_of_a_loader():
    _, _, _, loader = prepared()
    deepcopy(loader)


def a_pickled_loader():
    _, _, _, loader = prepared()
    pickle.dumps(loader)


MISUSES = {
    an_unprepared_optimizer: "optimizer-unprepared",
    a_loader_of_an_unknown_kind: "prepare-kind",
    an_object_of_an_unknown_kind: "prepare-kind",
    a_model_that_is_divided_already: "prepare-kind",
    an_optimizer_of_another_model: "optimizer-parameters",
    torchs_own_backward: "backward-missing",
    a_loss_that_is_not_a_number: "fp16-loss",
    a_model_without_layers_to_divide: "tensor-nothing",
    a_dataset_without_samples: "data-empty",
    a_copy_of_a_loader: "prepare-copy",
    a_pickled_loader: "prepare-copy",
}


@pytest.mark.parametrize(
    "misuse",
    [
        pytest.param(misuse, marks=[pytest.mark.needs("large")] if misuse is a_model_without_layers_to_divide else [])
        for misuse in MISUSES
    ],
    ids=lambda misuse: misuse.__name__,
)
def test_every_rank_raises_the_same(misuse):
    def work():
        with pytest.raises(PacelineError) as caught:
            misuse()
        return caught.value.code, str(caught.value)

    first, second = run_ranks(work, world=2, timeout_s=20)
    assert first == second
    assert first[0] == MISUSES[misuse]
    assert "\n  why: " in first[1]
    assert "\n  fix: " in first[1]


def test_gradients_of_ones_own_are_averaged_by_the_loss_that_the_error_names():
    def work():
        weights = []
        for plan in ({}, {"zero": 2}, {"zero": 3}):
            accelerator, model, optimizer, loader = prepared(plan=plan, split_batches=True)
            for x, _ in loader:
                gradients = [torch.full(p.shape, float(x.mean())) for p in model.parameters()]
                accelerator.backward(sum((p * g).sum() for p, g in zip(model.parameters(), gradients, strict=True)))
                optimizer.step()
                optimizer.zero_grad()
            weights.append(accelerator.get_state_dict(model)["weight"])
        return weights

    (expected,) = run_ranks(work, world=1)
    for weights in run_ranks(work, world=2):
        torch.testing.assert_close(weights, expected)


def test_two_models_of_which_one_holds_the_other_bypass_nothing():
    def work():
        accelerator = Accelerator(cpu=True)
        inner = nn.Linear(4, 1)
        whole = nn.Sequential(inner)
        inner, whole, optimizer = accelerator.prepare(inner, whole, torch.optim.SGD(whole.parameters(), lr=0.1))
        x = torch.full((1, 4), float(accelerator.process_index))
        for _ in range(2):
            accelerator.backward(whole(x).sum())
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.unwrap_model(inner).weight.tolist()

    first, second = run_ranks(work, world=2)
    assert first == second


# -- checkpoints: what is refused, and that what was saved before still loads ---------------------------------------


def damaged(folder):
    largest = max(Path(folder).glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def incomplete(folder):
    next(Path(folder).glob("*.distcp")).unlink()


@pytest.mark.parametrize(("harm", "code"), [(damaged, "checkpoint-damaged"), (incomplete, "checkpoint-damaged"),
                                            (shutil.rmtree, "checkpoint-missing")])  # fmt: skip
def test_a_checkpoint_that_cannot_be_loaded_changes_nothing(harm, code, tmp_path):
    def work():
        accelerator, model, _, _ = prepared(project_dir=tmp_path)
        accelerator.save_state()
        accelerator.save_state(tmp_path / "other")
        if accelerator.is_main_process:
            harm(tmp_path / "other")
        accelerator.wait_for_everyone()
        weight = accelerator.unwrap_model(model).weight
        weight.data.fill_(7.0)
        with pytest.raises(PacelineError) as caught:
            accelerator.load_state(tmp_path / "other")
        assert weight.eq(7.0).all()
        accelerator.load_state()
        return caught.value.code, weight.eq(7.0).any().item()

    assert run_ranks(work, world=2) == [(code, False)] * 2


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path):
    def work():
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(nn.Linear(4, 1))
        accelerator.save_state(tmp_path / "saved")
        other = Accelerator(cpu=True)
        model = other.prepare(nn.Linear(4, 3))
        before = other.unwrap_model(model).weight.clone()
        with pytest.raises(PacelineError) as caught:
            other.load_state(tmp_path / "saved")
        assert torch.equal(other.unwrap_model(model).weight, before)
        return caught.value.code, "weight: (1, 4) there, (3, 4) here" in str(caught.value)

    assert run_ranks(work, world=2) == [("checkpoint-other-model", True)] * 2


@pytest.fixture
def folder():
    """One that other users may enter, as pytest's are not."""
    with TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_no_permission_and_a_full_disk_lose_nothing(folder):
    def work():
        accelerator, _, _, _ = prepared()
        accelerator.save_state(folder / "by root")  # whatever is imported for it, only root may be able to read
        if os.geteuid() == 0:  # who may write anywhere
            accelerator.wait_for_everyone()
            os.seteuid(65534)
        codes = []
        with pytest.raises(PacelineError) as caught:
            accelerator.save_state(folder / "closed" / "new")
        codes.append(caught.value.code)
        accelerator.save_state(folder / "open" / "saved")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))  # refused as on a full disk
        with pytest.raises(PacelineError) as caught:
            accelerator.save_state(folder / "open" / "saved")
        codes.append(caught.value.code)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        accelerator.load_state(folder / "open" / "saved")
        return codes, os.listdir(folder / "open"), os.listdir(folder / "closed")

    for name, mode in (("closed", 0o555), ("open", 0o777)):
        (folder / name).mkdir()
        (folder / name).chmod(mode)
    expected = ["checkpoint-not-writable", "checkpoint-disk-full"]
    assert run_ranks(work, world=2) == [(expected, ["saved"], [])] * 2
