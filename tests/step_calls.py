"""Counts the Python calls of a training step: what Paceline adds to those of plain PyTorch.

    python tests/step_calls.py              the number of each case
    python tests/step_calls.py shard:clip   who makes the calls of one case

Calls are counted and not timed, so that a count is the same on every machine. The limits are in
`tests/together/test_step_calls.py`.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.testing import run_ranks

BATCH = 4
# Steps 17 to 24: the first ones are looked at, and those whose number is a power of two are compared with other ranks.
_BEFORE = 16
COUNTED = 8

Steps = Iterator[None]
PLANS = {"one": {}, "replicate": {}, "zero 2": {"zero": 2}, "shard": {"shard": 2}}


class Case(NamedTuple):
    """A loop.

    Attributes:
        door: the library under whose names it is written; "native" for ours.
        accumulate: whether its body stands in `accumulate`.
        window: the micro-batches of a step.
        items: whether `num_items` is passed.
        clip: whether gradients are clipped.
        optimizers: the number of optimizers.
    """

    door: str = "native"
    accumulate: bool = True
    window: int = 1
    items: bool = False
    clip: bool = False
    optimizers: int = 1


CASES = {
    "plain": Case(accumulate=False),
    "accumulate": Case(),
    "window of 2": Case(window=2),
    "num_items": Case(items=True),
    "clip": Case(clip=True),
    "two optimizers": Case(optimizers=2),
    "all": Case(window=2, items=True, clip=True, optimizers=2),
    "accelerate": Case("accelerate", clip=True),
    "deepspeed": Case("deepspeed", clip=True),
}


def calls_of(steps: Steps) -> Counter[str]:
    """Returns the Python calls of eight micro-batches, by the file and name of the function."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            file = frame.f_code.co_filename.rpartition("/src/")[2].rpartition("/site-packages/")[2]
            calls[f"{file}:{frame.f_code.co_qualname}"] += 1

    for _ in range(_BEFORE):
        next(steps)
    # What dies meanwhile would call back those that hold it weakly.
    gc.collect()
    gc.disable()
    sys.setprofile(count)
    for _ in range(COUNTED):
        next(steps)
    sys.setprofile(None)
    gc.enable()
    steps.close()  # type: ignore[attr-defined]
    return calls


def parts(case: Case) -> tuple[nn.Module, list[torch.optim.Optimizer], DataLoader]:
    torch.manual_seed(0)
    layers = [nn.Linear(10, 5), *(nn.Linear(5, 5) for _ in range(case.optimizers - 1))]
    optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers]
    data = TensorDataset(torch.randn(BATCH * 64, 10), torch.randint(0, 5, (BATCH * 64,)))
    model = layers[0] if len(layers) == 1 else nn.Sequential(*layers)
    return model, optimizers, DataLoader(data, BATCH)


def loss_of(case: Case, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="sum" if case.items else "mean")


def plain(case: Case) -> Steps:
    """The loop without any library, with which the others are compared."""
    model, optimizers, loader = parts(case)
    for number, (x, y) in enumerate(loader, 1):
        loss_of(case, model, x, y).backward()
        if number % case.window == 0:
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        yield


def ours(case: Case, plan: str) -> Steps:
    """The loop under Paceline's names, or under accelerate's."""
    accelerator = accelerates(case, plan) if case.door == "accelerate" else native(case, plan)
    model, optimizers, loader = parts(case)
    model, loader, *optimizers = accelerator.prepare(model, loader, *optimizers)
    for x, y in loader:
        with accelerator.accumulate(model) if case.accumulate else nullcontext():
            loss = loss_of(case, model, x, y)
            if case.items:
                accelerator.backward(loss, num_items=len(y))
            else:
                accelerator.backward(loss)
            if case.clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        yield


def native(case: Case, plan: str) -> Any:
    return Accelerator(cpu=True, plan=PLANS[plan], gradient_accumulation_steps=case.window)


def accelerates(case: Case, plan: str) -> Any:
    from paceline_accelerate.accelerator import Accelerator as Accelerates
    from paceline_accelerate.fsdp_plugin import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin() if plan == "shard" else None
    return Accelerates(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=case.window)


def engines(case: Case, plan: str) -> Steps:
    """The loop under DeepSpeed's names."""
    from paceline_deepspeed.initialize import initialize

    model, (optimizer,), loader = parts(case)
    config = {
        "train_batch_size": BATCH * case.window,
        "gradient_accumulation_steps": case.window,
        "gradient_clipping": 1.0 if case.clip else 0.0,
        "zero_optimization": {"stage": {"zero 2": 2, "shard": 3}.get(plan, 0)},
    }
    engine, *_ = initialize(model=model, optimizer=optimizer, config=config)
    rows = engine.train_micro_batch_size_per_gpu()
    for x, y in loader:
        engine.backward(loss_of(case, engine, x[:rows], y[:rows]))
        engine.step()
        yield


def count_all(plans: tuple[str, ...], names: tuple[str, ...] = tuple(CASES)) -> dict[tuple[str, str], Counter[str]]:
    """Returns the calls of cases under plans. Runs on as many ranks as these need."""
    torch.set_num_threads(1)
    gc.collect()  # runs of earlier tests would be told of each step
    # First, since a run registers a hook for all optimizers of the process.
    without = {name: calls_of(plain(CASES[name])) for name in names}
    more: dict[tuple[str, str], Counter[str]] = {}
    for plan, name in itertools.product(plans, names):
        case = CASES[name]
        if plan == "zero 2" and case.door == "accelerate":
            continue  # it has no such plan
        more[plan, name] = calls_of(engines(case, plan) if case.door == "deepspeed" else ours(case, plan))
        more[plan, name].subtract(without[name])
    return more


def outside_of_torch(calls: Counter[str]) -> float:
    """Returns the number of calls a micro-batch whose functions are none of torch's, which differ between its versions."""
    return sum(number for function, number in calls.items() if not function.startswith("torch/")) / COUNTED


def main() -> None:
    calls = run_ranks(count_all, world=1, args=(("one",),))[0]
    calls |= run_ranks(count_all, world=2, args=(tuple(PLANS)[1:],))[0]
    print("Python calls of a micro-batch beyond those of plain PyTorch, and those of them outside of torch\n")
    print(f"| | {' | '.join(PLANS)} |\n|---|{'---|' * len(PLANS)}")
    for name in CASES:
        numbers: list[str] = []
        for plan in PLANS:
            counted = calls.get((plan, name))
            numbers.append(
                "" if counted is None else f"{counted.total() / COUNTED:.0f}, {outside_of_torch(counted):.0f}"
            )
        print(f"| {name} | {' | '.join(numbers)} |")
    for plan, name in (each.split(":") for each in sys.argv[1:]):
        print(f"\n{plan}, {name}")
        for function, number in calls[plan, name].most_common():
            if number:
                print(f"{number / COUNTED:8.1f}  {function}")


if __name__ == "__main__":
    main()
