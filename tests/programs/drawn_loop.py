"""Training programs for DeepSpeed, drawn by seed: a config, a model and a loop. `drawn` runs this file under both libraries.

python -m deepspeed.launcher.runner --num_gpus 2 drawn_loop.py OUTPUT FIRST LAST
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found, unused-ignore]
import torch
from drawn_choices import draw  # type: ignore[import-not-found, unused-ignore]
from torch import nn
from torch.utils.data import TensorDataset

WIDTH = 8


class Net(nn.Module):
    """A small model of layers and a head; one layer may be frozen, share its weight, or be left out of a pass."""

    def __init__(self, program: dict[str, Any]) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if program["norm"] else nn.Identity()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1, bias=False)
        if program["tied"]:
            self.third.weight = self.second.weight
        if program["frozen"]:
            self.second.requires_grad_(False)

    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = self.norm(hidden) + torch.tanh(self.second(hidden))
        if not skips:
            hidden = hidden + torch.tanh(self.third(hidden))
        return self.head(hidden)  # type: ignore[no-any-return]


def build(program: dict[str, Any]) -> Any:
    """Returns what `initialize` gives for a program."""
    model = Net(program)
    config: dict[str, Any] = program["config"]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: Any = trained
    if program["groups"]:
        groups = [
            {"params": [parameter for parameter in trained if parameter.dim() > 1]},
            {"params": [parameter for parameter in trained if parameter.dim() == 1], "weight_decay": 0.0},
        ]
    arguments: dict[str, Any] = {"model_parameters": groups}
    decay = program["decay"]
    if program["optimizer"] == "own SGD":
        arguments = {"optimizer": torch.optim.SGD(groups, 0.01, momentum=0.9, weight_decay=decay)}
    elif program["optimizer"] == "own Adam":
        arguments = {"optimizer": torch.optim.Adam(groups, 0.01, weight_decay=decay)}
    elif program["optimizer"] == "own AdamW":
        arguments = {"optimizer": torch.optim.AdamW(groups, 0.01, weight_decay=decay)}
    elif program["optimizer"] == "Lion" and "paceline" not in sys.modules:
        # DeepSpeed's own is compiled. It gets that of another package, and Paceline makes what the config names.
        from lion_pytorch import Lion  # type: ignore[import-not-found, unused-ignore]

        params = program["config"]["optimizer"]["params"]
        arguments = {"optimizer": Lion(groups, **params)}
        config = {key: value for key, value in config.items() if key != "optimizer"}
    elif program["optimizer"] == "made by a function":
        arguments["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, 0.01, weight_decay=decay)
    if program["scheduler"] == "own LambdaLR":
        arguments["lr_scheduler"] = lambda_rate(arguments["optimizer"])
    elif program["scheduler"] == "made by a function":
        arguments["lr_scheduler"] = lambda_rate
    if program["loader"]:
        generator = torch.Generator().manual_seed(9)
        x = torch.randn(60, 6, generator=generator)
        arguments["training_data"] = TensorDataset(x, x.sum(1, keepdim=True))
    return deepspeed.initialize(model=model, config=config, **arguments)


def lambda_rate(optimizer: Any) -> Any:
    """Returns a scheduler of the script's."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def batches(program: dict[str, Any], loader: Any, micro: int, seed: int) -> Iterator[Any]:
    """Yields micro-batches: of the engine's loader, or drawn."""
    if program["loader"]:
        while True:
            yield from loader
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(micro, 6, generator=generator)
        yield x, x.sum(1, keepdim=True)


def backward(engine: Any, loss: torch.Tensor, program: dict[str, Any]) -> None:
    """Runs the backward pass of a loss, or of two that are its parts."""
    if program["backward"] == "loss":
        loss.backward()
    elif program["backward"] == "scale":
        engine.scale(loss).backward()
    elif program["losses"] == 1:
        engine.backward(loss)
    else:
        engine.backward(loss * 0.25, retain_graph=True)
        engine.backward(loss * 0.75)


def numbers(values: Any) -> Any:
    """Returns a value as JSON has it: numbers and lists of them."""
    if isinstance(values, (list, tuple)):
        return [numbers(value) for value in values]
    return None if values is None else float(values)


def see(engine: Any, program: dict[str, Any], seen: dict[str, Any], boundary: bool) -> None:
    """Notes what an engine says of itself after a micro-batch."""
    counters = [engine.global_steps, engine.skipped_steps, engine.global_samples]
    answers = [engine.was_step_applied(), engine.is_gradient_accumulation_boundary()]
    seen["counters"].append([*counters, *map(int, answers)])
    if not boundary:
        return
    seen["norms"].append(numbers(engine.get_global_grad_norm()))
    seen["rates"].append(numbers(engine.get_lr()))
    seen["momenta"].append(numbers(engine.get_mom()))
    if engine.lr_scheduler is not None:
        seen["last_rates"].append(numbers(engine.lr_scheduler.get_last_lr()))
    if program["precision"] in ("fp16", "fp16 fixed"):
        seen["scales"].append(float(engine.optimizer.cur_scale))
        seen["scales"].append(float(engine.optimizer.loss_scale))
        seen["scales"].append(float(engine.optimizer.overflow))


def look_inside(engine: Any, program: dict[str, Any], seen: dict[str, Any]) -> None:
    """Notes a gradient, a weight and a state of one parameter, as `deepspeed.utils` gives them."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    weight = engine.module.first.weight
    gradient = safe_get_full_grad(weight)
    seen["gradients"].append(None if gradient is None else gradient.flatten().tolist())
    if program["config"]["zero_optimization"]["stage"] or program["precision"] == "bf16":
        master = safe_get_full_fp32_param(weight)
        seen["masters"].append(None if master is None else master.flatten().tolist())


def reload(engine: Any, program: dict[str, Any], folder: str) -> Any:
    """Saves, and returns what `initialize` gives for an engine of other weights that has loaded it."""
    how = program["reloads"]
    tag = "mine" if how == "by tag" else None
    engine.save_checkpoint(folder, tag=tag, client_state={"note": 5}, save_latest=tag is None)
    made = build(program)
    path, client_state = made[0].load_checkpoint(
        folder,
        tag,
        load_optimizer_states=how != "no optimizer",
        load_lr_scheduler_states=how not in ("no scheduler", "no optimizer"),
        load_module_only=how == "module alone",
    )
    assert path is not None
    assert client_state["note"] == 5
    return made


def train(seed: int, rank: int, output: Path) -> dict[str, Any]:
    """Runs the program of a seed; returns what is compared."""
    program = draw(seed)
    torch.manual_seed(seed)
    engine, _, loader, _ = build(program)
    micro = engine.train_micro_batch_size_per_gpu()
    data = batches(program, loader, micro, 1000 * seed + rank)
    names = ("losses", "rates", "last_rates", "momenta", "norms", "scales", "counters", "gradients", "masters")
    seen: dict[str, Any] = {name: [] for name in names}
    has_reloaded = False
    for number in range(program["micro_batches"]):
        x, y = next(data)
        if program["outlier"] and number == program["outlier"]:
            x = x * (3e4 if "fp16" in program["precision"] else float("nan"))
        dtype = next(engine.module.parameters()).dtype
        x = x.to(dtype)
        # Inside a window DeepSpeed drops nothing then at stage 3.
        if number == 0 or (program["config"]["gradient_accumulation_steps"] == 1 and not program["sets_batch"]):
            if program["zeroes"] == "engine":
                engine.zero_grad()
            elif program["zeroes"] == "optimizer":
                engine.optimizer.zero_grad()
            elif program["zeroes"] == "module":
                engine.module.zero_grad()
        if program["no_sync"]:
            with engine.no_sync():
                engine.backward(engine(-x).float().square().mean())
        predicted = engine(x, skips=program["skips"] and number % 2 == 1)
        loss = (predicted.float() - y).square().mean()
        seen["losses"].append(loss.item())
        backward(engine, loss, program)
        managed = program["config"].get("managed_gradient_accumulation", True)
        boundary = engine.is_gradient_accumulation_boundary() or not managed
        if boundary and managed:  # else DeepSpeed has no gradients before the step, and says so on some ranks alone
            look_inside(engine, program, seen)
        engine.step()
        see(engine, program, seen, boundary)
        if boundary and engine.global_steps == program["sets_rate"]:
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.003
        if boundary and engine.global_steps == 2 and program["sets_batch"]:
            engine.set_train_batch_size(engine.train_batch_size() * 2)
        if program["reloads"] and boundary and engine.global_steps == 3 and not has_reloaded:
            has_reloaded = True
            engine, _, _, _ = reload(engine, program, str(output / f"saved-{seed}"))
            see(engine, program, seen, False)
        if program["evaluates"] and number % 3 == 2:
            engine.eval()
            with torch.no_grad():
                seen["losses"].append(engine(x).float().mean().item())
            engine.train()
    weights: list[float] = []
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            weights += parameter.detach().float().flatten().tolist()
    seen["weights"] = weights
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
            seen = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        (output / f"{seed}-{rank}.json").write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    main()
