"""Checkpoints under DeepSpeed's calls: saved at one stage and width, they go on at any other as if nothing had happened."""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from shared_ranks import run_ranks
from torch import nn

from paceline import testing
from paceline.base.errors import CheckpointError, ConfigError
from paceline_deepspeed.initialize import initialize

STEPS = 3


def _config(stage: int, world: int, **more) -> dict:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2 if world < 4 else 1,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 6}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def _engine(stage: int, world: int, seed: int = 0, **more):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    model[2].weight.requires_grad_(False)
    return initialize(model=model, model_parameters=None, config=_config(stage, world, **more))[0]


def _micro(engine, number: int) -> float:
    """One micro-batch of a window: the rows of this rank."""
    step, inside = divmod(number, engine.batch.accumulate)
    rows = torch.randn(8, 5, generator=torch.Generator().manual_seed(step)).chunk(engine.batch.accumulate)[inside]
    accelerator = engine.accelerator
    mine = rows.chunk(accelerator.num_processes)[accelerator.process_index]
    loss = engine(mine).square().mean()
    engine.backward(loss)
    engine.step()
    return float(accelerator.reduce(loss.detach(), "mean"))


def _train(engine, steps: int) -> list[float]:
    """Mean loss of each of the next steps."""
    found = []
    for _ in range(steps):
        first, count = engine.micro_steps, engine.batch.accumulate
        found.append(sum(_micro(engine, first + each) for each in range(count)) / count)
    return found


def _save(folder: str, stage: int, world: int) -> list[float]:
    engine = _engine(stage, world)
    _train(engine, STEPS)
    state = {"epoch": 2, "best": torch.tensor([1.5]), "args": Namespace(name="x"), "seen": {1, 2}}
    assert engine.save_checkpoint(folder, client_state=state) is True
    return _train(engine, STEPS)


def _load(folder: str, stage: int, world: int) -> tuple:
    engine = _engine(stage, world, seed=9)
    path, client = engine.load_checkpoint(folder)
    counters = engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps
    return _train(engine, STEPS), path, client, counters, engine.batch.accumulate


@pytest.mark.parametrize(
    ("saved", "loaded"), [((0, 1), (3, 2)), ((3, 2), (0, 1)), ((1, 2), (2, 4)), ((2, 2), (1, 2)), ((3, 4), (3, 2))]
)
def test_goes_on_at_another_stage_and_width(saved, loaded, tmp_path):
    folder = str(tmp_path / "ckpts")
    wanted = run_ranks(_save, world=saved[1], args=(folder, *saved))[0]
    assert (tmp_path / "ckpts" / "latest").read_text() == f"global_step{STEPS}"
    for losses, path, client, counters, window in run_ranks(_load, world=loaded[1], args=(folder, *loaded)):
        assert losses == pytest.approx(wanted, abs=2e-6)
        assert path == os.path.join(folder, f"global_step{STEPS}")
        assert client["epoch"] == 2 and client["args"] == Namespace(name="x") and client["seen"] == {1, 2}
        assert client["best"].tolist() == [1.5]
        assert counters == (STEPS, 8 * STEPS, 0, window * STEPS)


def _in_window(folder: str) -> tuple[list[float], list[float]]:
    """A save after the first micro-batch of two."""
    engine = _engine(2, 2)
    _train(engine, 1)
    _micro(engine, engine.micro_steps)
    engine.save_checkpoint(folder, tag="open")
    rest = [_micro(engine, engine.micro_steps), *_train(engine, 2)]
    other = _engine(3, 2, seed=5)
    # Without the gradients of the open window its micro-batch does not count. The engine's own window stays.
    other.load_checkpoint(folder, "open", load_optimizer_states=False)
    assert (other.global_steps, other.steps_in_window, other.micro_steps) == (1, 0, 2)
    _micro(other, other.micro_steps)
    other.load_checkpoint(folder, "open", load_optimizer_states=False)
    assert (other.global_steps, other.steps_in_window, other.micro_steps) == (1, 1, 3)
    other.load_checkpoint(folder, "open")
    return rest, [_micro(other, other.micro_steps), *_train(other, 2)]


def test_an_open_window_goes_on(tmp_path):
    for rest, again in run_ranks(_in_window, world=2, args=(str(tmp_path),)):
        assert again == pytest.approx(rest, abs=2e-6)


def _parts(folder: str) -> None:
    engine = _engine(2, 2)
    _train(engine, 2)
    engine.save_checkpoint(folder, tag="all", save_latest=False)
    assert engine.load_checkpoint(folder) == (None, None)  # no `latest`: a warning
    kept = {name: value.clone() for name, value in engine.module_state_dict().items()}

    other = _engine(0, 2, seed=3)
    other.load_checkpoint(folder, "all", load_module_only=True)
    for name, value in other.module_state_dict().items():
        torch.testing.assert_close(value, kept[name])
    assert other.global_steps == 0 and not other.optimizer.state
    _train(other, 1)

    other = _engine(3, 2, seed=3)
    rate = other.lr_scheduler.state_dict()
    other.load_checkpoint(folder, "all", load_optimizer_states=False, load_lr_scheduler_states=False)
    assert other.global_steps == 2 and not other.optimizer.state
    assert other.lr_scheduler.state_dict() == rate

    other = _engine(3, 2, seed=3)

    def load(src, dst) -> None:
        dst.load_state_dict({name: value * 2 for name, value in src.items()})

    other.load_checkpoint(folder, "all", custom_load_fn=load)
    for name, value in other.module_state_dict().items():
        torch.testing.assert_close(value, kept[name] * 2)

    engine.save_checkpoint(folder, tag="trained", exclude_frozen_parameters=True)
    other = _engine(3, 2, seed=3)
    other.load_checkpoint(folder)
    own = other.module_state_dict()
    torch.testing.assert_close(own["0.weight"], kept["0.weight"])
    assert not torch.equal(own["2.weight"], kept["2.weight"])  # it kept its own


def test_parts_of_a_checkpoint(tmp_path):
    run_ranks(_parts, world=2, args=(str(tmp_path),))


class _Said(logging.Handler):
    """What is logged from here on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("paceline.compat").addHandler(self)

    def emit(self, entry: logging.LogRecord) -> None:
        self.lines.append(entry.getMessage())


def _bad(folder: str) -> list:
    engine = _engine(0, 2)
    found = []
    with pytest.raises(ConfigError) as caught:
        engine.save_checkpoint("")
    found.append(caught.value.code)
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, client_state={"net": nn.Linear(1, 1)})
    found += [caught.value.code, "client_state/net" in str(caught.value)]
    rank = engine.accelerator.process_index
    said = _Said()
    engine.save_checkpoint(folder, tag=f"from{rank}")
    assert rank or "under several tags (rank 0: 'from0', rank 1: 'from1')" in said.lines[0]
    found.append(sorted(name for name in os.listdir(folder) if name.startswith("from")))
    strict = _engine(0, 2, checkpoint={"tag_validation": "Fail"})
    with pytest.raises(ConfigError) as caught:
        strict.save_checkpoint(folder, tag=f"from{rank}")
    found.append(caught.value.code)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder, "nowhere")
    found.append(caught.value.code)
    latest = os.path.join(folder, "latest")
    together = engine.accelerator.wait_for_everyone
    together()
    if not rank:
        os.unlink(latest)
        os.symlink("../victim.txt", latest)
    together()
    engine.save_checkpoint(folder, tag="linked")
    together()
    found.append(os.path.islink(latest))
    if not rank:
        with open(latest, "w") as file:
            file.write("../elsewhere")
    together()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder)
    found.append(caught.value.code)
    return found


def test_bad_input(tmp_path):
    (tmp_path / "victim.txt").write_text("mine")
    for found in run_ranks(_bad, world=2, args=(str(tmp_path / "run"),)):
        assert found == [
            "deepspeed-save-dir",
            "checkpoint-value",
            True,
            ["from0"],
            "deepspeed-tag",
            "checkpoint-missing",
            False,
            "checkpoint-unsafe",
        ]
    assert (tmp_path / "victim.txt").read_text() == "mine", "a link named `latest` is replaced, not followed"


def _only_rank_0(folder: str, then: str) -> None:
    engine = _engine(1, 2)
    _train(engine, 1)
    if engine.accelerator.is_main_process:
        try:
            engine.save_checkpoint(folder)
        except CheckpointError as error:
            # As a file: at times rank 1, which then stands alone, is the one whose failure is reported.
            Path(folder, "told.txt").write_text(str(error))
            raise
    elif then == "trains":
        _train(engine, 1)


def test_a_save_on_rank_0_alone_names_who_went_on_or_ended(tmp_path):
    for then, why in (
        ("trains", "rank 1 went on to micro-batch 3; this rank has done 2"),
        ("ends", "rank 1 has ended"),
    ):
        with pytest.raises(testing.RankFailed):
            testing.run_ranks(_only_rank_0, world=2, args=(str(tmp_path), then))
        told = (tmp_path / "told.txt").read_text()
        assert "rank 0 called save_checkpoint, but rank 1 did not.  [checkpoint-ranks-missing]" in told
        assert why in told and "outside of `if rank == 0`" in told


def _sixteen_bits(folder: str) -> None:
    for stage, precision in ((1, {}), (3, {"bf16": {"enabled": True}})):
        engine = _engine(stage, 2, **precision)
        _train(engine, 1)
        assert engine.save_16bit_model(folder, f"stage{stage}.bin") is True
        whole = engine.module_state_dict()
        saved = torch.load(os.path.join(folder, f"stage{stage}.bin"), weights_only=True)
        dtype = torch.bfloat16 if precision else torch.float32
        assert {each.dtype for each in saved.values()} == {dtype}
        for name, value in saved.items():
            torch.testing.assert_close(value, whole[name].to(dtype))
        assert set(saved) == set(whole)


def test_whole_weights_in_16_bits(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.mkdir()
    folder.mkdir()
    (folder / ".stage1.bin.new").symlink_to(victim)
    run_ranks(_sixteen_bits, world=2, args=(str(folder),))
    # Nothing is written through a link that somebody else has put there.
    assert sorted(os.listdir(folder)) == [".stage1.bin.new", "stage1.bin", "stage3.bin"] and not os.listdir(victim)
