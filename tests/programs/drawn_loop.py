"""Training programs for DeepSpeed, drawn by seed: a config, a model and a loop. `drawn` runs this file under both libraries.

python -m deepspeed.launcher.runner --num_gpus 2 drawn_loop.py OUTPUT FIRST LAST
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found, unused-ignore]
import torch
from drawn_choices import draw  # type: ignore[import-not-found, unused-ignore]
from torch import nn

WIDTH = 8


class Net(nn.Module):
    """A small model of embeddings, layers and a head; one layer may be frozen."""

    def __init__(self, norm: bool, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1, bias=False)
        if frozen:
            self.second.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = self.norm(hidden) + torch.tanh(self.second(hidden))
        return self.head(hidden)  # type: ignore[no-any-return]


def build(program: dict[str, Any]) -> Any:
    """Returns the engine of a program."""
    model = Net(program["norm"], program["frozen"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: Any = trained
    if program["groups"]:
        groups = [
            {"params": [parameter for parameter in trained if parameter.dim() > 1]},
            {"params": [parameter for parameter in trained if parameter.dim() == 1], "weight_decay": 0.0},
        ]
    arguments: dict[str, Any] = {"model_parameters": groups}
    if program["optimizer"] == "own SGD":
        arguments = {"optimizer": torch.optim.SGD(groups, 0.05, momentum=0.9, weight_decay=program["decay"])}
    elif program["optimizer"] == "own Adam":
        arguments = {"optimizer": torch.optim.Adam(groups, 0.01, weight_decay=program["decay"])}
    engine, *_ = deepspeed.initialize(model=model, config=program["config"], **arguments)
    return engine


def backward(engine: Any, loss: torch.Tensor, program: dict[str, Any]) -> None:
    """Runs the backward pass of a loss, or of two that are its parts."""
    if program["backward"] == "loss":
        loss.backward()
    elif program["losses"] == 1:
        engine.backward(loss)
    else:
        engine.backward(loss * 0.25, retain_graph=True)
        engine.backward(loss * 0.75)


def train(seed: int, rank: int, output: Path) -> dict[str, Any]:
    """Runs the program of a seed; returns what is compared."""
    program = draw(seed)
    torch.manual_seed(seed)
    engine = build(program)
    micro = engine.train_micro_batch_size_per_gpu()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    seen: dict[str, Any] = {"losses": [], "rates": [], "norms": [], "scales": []}
    for number in range(program["micro_batches"]):
        x = torch.randn(micro, 6, generator=generator)
        y = x.sum(1, keepdim=True)
        if program["outlier"] and number == program["outlier"]:
            x = x * 3e4
        if program["no_sync"]:
            with engine.no_sync():
                early = engine((-x).to(engine.module.first.weight.dtype)).float().square().mean()
                engine.backward(early)
        predicted = engine(x.to(engine.module.first.weight.dtype))
        loss = (predicted.float() - y).square().mean()
        seen["losses"].append(loss.item())
        backward(engine, loss, program)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if boundary:
            norm = engine.get_global_grad_norm()
            seen["norms"].append(None if norm is None else float(norm))
            seen["rates"].append([float(rate) for rate in engine.get_lr()])
            if "fp16" in program["precision"] and hasattr(engine.optimizer, "cur_scale"):
                seen["scales"].append(float(engine.optimizer.cur_scale))
        if program["reloads"] and boundary and engine.global_steps == 3:
            engine.save_checkpoint(str(output / f"saved-{seed}"), client_state={"seed": seed})
            engine = build(program)  # of other weights
            _, client_state = engine.load_checkpoint(str(output / f"saved-{seed}"))
            assert client_state["seed"] == seed
        if program["evaluates"] and number % 3 == 2:
            engine.eval()
            with torch.no_grad():
                engine(x.to(engine.module.first.weight.dtype))
            engine.train()
    weights: list[float] = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weights += parameter.detach().float().flatten().tolist()
    seen["weights"] = weights
    # DeepSpeed counts micro-steps anew after a load.
    micro_steps = 0 if program["reloads"] else engine.micro_steps
    seen["counters"] = [engine.global_steps, micro_steps, engine.skipped_steps, engine.global_samples]
    return seen


def main() -> None:
    """Runs the programs of a range of seeds in one process group."""
    words = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
    output, first, last = Path(words[0]), int(words[1]), int(words[2])
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    for seed in range(first, last + 1):
        try:
            seen = train(seed, rank, output)
        except Exception as error:  # of the library under test; the next seed has an engine of its own
            seen = {"error": f"{type(error).__name__}: {error}"}
        (output / f"{seed}-{rank}.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
