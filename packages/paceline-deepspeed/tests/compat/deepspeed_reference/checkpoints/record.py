"""Folders of the real DeepSpeed 0.19.8, and the losses of the runs that wrote them: `folders.tar.xz`, `losses.json`.

Run on two processes, with a python that has deepspeed, and nothing else of ours:

    DS_ACCELERATOR=cpu LOCAL_SIZE=2 python -m torch.distributed.run --nproc-per-node 2 record.py /tmp/recorded

For each stage and precision it trains `STEPS` steps, saves, and goes on for as many again. `zero_to_fp32.py`, which
the library lays into each folder, is left out of the archive.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import torch
from torch import nn

STEPS = 4
CASES = [(stage, precision) for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]


class Net(nn.Module):
    """Odd sizes (so that divisions have padding), two groups, a frozen layer, a tied weight, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.back = nn.Linear(7, 5)
        self.out = nn.Linear(7, 5, bias=False)
        self.out.weight = self.back.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.frozen(torch.relu(self.norm(self.inner(x))))
        return self.back(hidden) + self.out(hidden).square()


def groups(model: nn.Module) -> list[dict]:
    """Weights with decay, the rest without."""
    own = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in own if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in own if p.dim() == 1], "weight_decay": 0.0},
    ]


def config(stage: int, precision: str) -> dict:
    """What DeepSpeed is told; with AdamW given by the script."""
    told = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.05, "warmup_num_steps": 6},
        },
    }
    return told | ({"bf16": {"enabled": True}} if precision == "bf16" else {})


def batch(step: int) -> torch.Tensor:
    """The global batch of a step."""
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(100 + step))


def train(engine, first: int, last: int, rank: int, dtype: torch.dtype) -> list[float]:
    """Losses of this rank's half, averaged over ranks by whoever reads them."""
    losses = []
    for step in range(first, last):
        rows = batch(step)[rank * 4 : rank * 4 + 4].to(dtype)
        loss = engine(rows).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main(folder: Path) -> None:
    """Records all cases."""
    import deepspeed
    import deepspeed.comm as dist

    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    found = {}
    for stage, precision in CASES:
        torch.manual_seed(7)
        model = Net()
        optimizer = torch.optim.AdamW(groups(model), lr=0.01)
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config(stage, precision))
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        losses = train(engine, 0, STEPS, rank, dtype)
        name = f"stage{stage}_{precision}"
        engine.save_checkpoint(str(folder / name), client_state={"epoch": 3, "note": "kept"})
        losses += train(engine, STEPS, 2 * STEPS, rank, dtype)
        gathered = [None, None]
        dist.all_gather_object(gathered, losses)
        found[name] = [sum(pair) / 2 for pair in zip(*gathered, strict=True)]
        dist.barrier()
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(found, indent=1) + "\n")
        for extra in folder.rglob("zero_to_fp32.py"):
            extra.unlink()
        with tarfile.open(folder / "folders.tar.xz", "w:xz") as archive:
            for name in sorted(found):
                archive.add(folder / name, name)
        for name in found:
            shutil.rmtree(folder / name)
    dist.barrier()


if __name__ == "__main__":
    os.makedirs(sys.argv[1], exist_ok=True)
    main(Path(sys.argv[1]))
