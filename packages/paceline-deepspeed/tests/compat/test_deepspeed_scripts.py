"""Users' programs, as they were written for DeepSpeed, launched here.

data_parallel.py    a config in the script, a batch of 64 rows on each rank
scheduler.py        a client optimizer beside the config's, `lr_scheduler.step()` after `engine.step()`
trained.py          `--deepspeed_config`, `init_distributed(dist_backend="hccl")`, a loader and a sampler of its own,
                    `engine.train(**batch)`, `save_checkpoint(ckpt_id=, client_sd=)`
pipeline.py         layers in two stages, fp16, activation checkpointing, `train_batch()`
pipeline_loader.py  the same with a loader of whole batches in a `RepeatingLoader`
"""

from __future__ import annotations

from pathlib import Path

import launched
import pytest
from launched import run

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def launch(size: int, script: str, *words: str) -> list[str]:
    return [*launched.launch("deepspeed", size, SCRIPTS / script), *words]


@pytest.mark.parametrize("size", [1, 2])
def test_a_model_in_data_parallel(size: int, tmp_path: Path) -> None:
    said = run(launch(size, "data_parallel.py"), tmp_path)
    assert said.count("a micro-batch of 64 rows was fed to the engine, but a micro-batch is 32") == size - 1


@pytest.mark.parametrize("size", [1, 2])
def test_a_scheduler_and_two_optimizers(size: int, tmp_path: Path) -> None:
    alone = ["-m", "paceline.compat", "--compat", "deepspeed", str(SCRIPTS / "scheduler.py")]  # no launcher at all
    said = run(alone if size == 1 else launch(size, "scheduler.py"), tmp_path)
    assert said.count("two optimizers: the script's Adam (lr 0.01) is used") == 1
    assert said.count("`lr_scheduler.step()` is left out") == 1


def test_a_loop_with_a_config_file(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(
        """{
        "train_batch_size": 16,   # comments and a comma too many, as hjson has it
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "zero_optimization": {"stage": 2, "contiguous_gradients": true},
        "csv_monitor": {"enabled": true, "output_path": "logs", "job_name": "job"},
        "steps_per_print": 4,
        }"""
    )
    words = launch(2, "trained.py", "--deepspeed", "--deepspeed_config", "ds_config.json")
    said = run(words, tmp_path)
    assert said.count("the backend 'hccl' cannot reach this machine's device (cpu)") == 1
    assert said.count("`engine.train(**batch)` was called with a batch") == 1
    assert "step=4, skipped=0" in said and "from step 0, loss" in said
    first, last = (float(line.rpartition(" ")[2]) for line in said.splitlines() if "epoch loss" in line)
    assert last < 0.6 * first
    assert (tmp_path / "logs" / "job" / "Train_Samples_lr.csv").read_text().startswith("step,lr\n16,")
    again = run(words, tmp_path)
    assert "from step 16, loss" in again


def test_a_pipeline(tmp_path: Path) -> None:
    said = run(launch(2, "pipeline.py"), tmp_path)
    lines = [line for line in said.splitlines() if line.startswith("steps: ")]
    assert [int(line.split()[1]) for line in lines] == list(range(2, 101, 2))
    assert "skipped=0, lr=[0.001], mom=[(0.9, 0.999)], loss scale=65536" in said


@pytest.mark.parametrize("size", [1, 2])
def test_a_pipeline_with_a_loader_of_whole_batches(size: int, tmp_path: Path) -> None:
    said = run(launch(size, "pipeline_loader.py"), tmp_path)
    assert said.count("train_batch pulls 4 micro-batches, which came with 8 rows each, but a micro-batch is 2") == 1
    assert said.count("num_stages=2, but there is 1 process, which runs all stages") == 2 - size
    assert "steps: 100 loss: " in said
