"""Runs the cases under the real deepspeed and writes what they gave, one JSON file for each part.

    python3 -m venv .venv-deepspeed && .venv-deepspeed/bin/pip install torch==2.13.0 deepspeed==0.19.8 ninja
    .venv-deepspeed/bin/python record.py [partitions schedules batch scale training]

`training` runs two processes over gloo. The first run of deepspeed compiles its operators (minutes, a C++ compiler). Where
a build is killed it leaves a `lock` in ~/.cache/torch_extensions for which all later runs wait: remove it.
"""

import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_SIZE", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import cases

HERE = Path(__file__).parent


def partitions():
    """`parts` of each list of layers, by number of stages; for `type:` the weights that the expression gives."""
    import re

    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    def rows(sizes, method, split):
        return [
            {"stages": stages, "method": method, "parts": [int(each) for each in split(stages)]}
            for stages in cases.STAGES
        ]

    found = {}
    for name, sizes in cases.LAYERS.items():
        names = cases.class_names(sizes)
        made = rows(sizes, "uniform", lambda stages, sizes=sizes: partition_uniform(len(sizes), stages))
        made += rows(sizes, "parameters", lambda stages, sizes=sizes: partition_balanced(list(sizes), stages))
        for regex in cases.REGEXES:
            weights = [int(bool(re.search(regex, each, re.IGNORECASE))) for each in names]
            if any(weights):
                split = lambda stages, weights=weights: partition_balanced(list(weights), stages)  # noqa: E731
                made += rows(sizes, f"type:{regex}", split)
        found[name] = {"sizes": sizes, "classes": names, "partitions": made}
    return found


def schedules():
    """The rate (and betas, where they move) that each of 1,000 steps is taken with."""
    import torch
    from deepspeed.runtime import lr_schedules

    found = {}
    for name, (kind, parameters) in cases.SCHEDULES.items():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **cases.GROUP)
        scheduler = getattr(lr_schedules, kind)(optimizer, **parameters)
        (group,) = optimizer.param_groups
        rates, betas = [], []
        for _ in range(cases.STEPS):
            rates.append(float(f"{group['lr']:.10g}"))
            betas.append([float(f"{each:.10g}") for each in group["betas"]])
            scheduler.step()
        moves = any(each != betas[0] for each in betas)
        found[name] = {"rates": rates, "betas": [each[0] for each in betas] if moves else betas[0]}
        found[name]["beta2"] = sorted({each[1] for each in betas})
        found[name]["state"] = scheduler.state_dict()
    return found


def batch():
    """The three numbers, or the error, of each case."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    comm.get_rank = lambda *_: 0  # without an answer the width is silently taken as 1
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = []
    for *given, width in cases.BATCHES:
        mpu = type("Mpu", (), {"get_data_parallel_world_size": staticmethod(lambda width=width: width)})
        values = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
        row = {"given": given, "width": width}
        try:
            config = DeepSpeedConfig(values, mpu=mpu)
        except Exception as error:
            row["error"] = [type(error).__name__, str(error)]
        else:
            row["result"] = [getattr(config, key) for key in keys]
        found.append(row)
    return found


def scale():
    """The scale that each step was taken with; shorter where the scaler gave up."""
    from deepspeed import comm
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    comm.get_rank = lambda *_: 0
    found = {}
    for name, (given, overflows) in cases.SCALES.items():
        scaler = DynamicLossScaler(
            init_scale=2 ** given["initial_scale_power"],
            scale_window=given["loss_scale_window"],
            min_scale=given["min_loss_scale"],
            delayed_shift=given["hysteresis"],
            consecutive_hysteresis=given["consecutive_hysteresis"],
        )
        path, gave_up = [], False
        for step in range(cases.SCALE_STEPS):
            path.append(scaler.cur_scale)
            try:
                scaler.update_scale(step in overflows)
            except Exception:
                gave_up = True
                break
        found[name] = {"path": path, "gave_up": gave_up}
    return found


def training():
    """Losses and norms of the training programs, on two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.json")
        common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", out],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=HERE,
            )
            for rank in range(2)
        ]
        if any([each.wait(1800) for each in running]):
            sys.exit("a process failed")
        return json.loads(Path(out).read_text(encoding="utf-8"))


def worker(out):
    """One of the two processes."""
    import programs
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # it computes in float16 here, but says that it can't
    found = programs.everything()
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(found), encoding="utf-8")


PARTS = {each.__name__: each for each in (partitions, schedules, batch, scale, training)}


def main():
    """Writes the files of the parts that were asked for; without any, of all."""
    import deepspeed
    import torch

    for part in sys.argv[1:] or PARTS:
        about = {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "date": str(datetime.date.today())}
        rows = PARTS[part]()
        shown = json.dumps({"versions": about, part: rows})
        shown = shown.replace('}, {"', '},\n {"').replace('}, "', '},\n "')  # a line for each case
        (HERE / f"{part}.json").write_text(shown + "\n", encoding="utf-8")


if __name__ == "__main__":
    worker(sys.argv[2]) if sys.argv[1:2] == ["--worker"] else main()
