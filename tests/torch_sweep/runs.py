"""Trains one case in plain PyTorch and through `Accelerator`, and says in one word how both compare.

exact           the losses, weights, buffers and evaluation of one plain process, to 1e-10 in float64
synchronised    the same, by messages of layers that see a batch, which the plan names
named           other numbers, and the plan says so in one line
refused CODE    a coded error
as torch        the error that one plain process raises, too
WRONG, RAW      anything else: other numbers without a word, replicas that differ, an error without a code
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.base.errors import PacelineError
from paceline.testing import run_ranks

ROWS, BATCH, FEATURES, WORDS, EPOCHS = 12, 6, 8, 10, 2
TOLERANCE = 1e-10

# Settings of each data-parallel plan on `width` processes.
PLANS: dict[str, Callable[[int], dict[str, Any]]] = {
    "replicate": lambda width: {"replicate": width},
    "zero 1": lambda width: {"shard": width, "zero": 1},
    "zero 2": lambda width: {"shard": width, "zero": 2},
    "shard": lambda width: {"shard": width, "zero": 3},
}


@dataclass(frozen=True)
class Case:
    """One thing of torch's in a training loop.

    Attributes:
        name: as torch writes it, with the options.
        model: builds the model, which is called with x [rows, FEATURES] and words [rows, 3] and returns one value a row.
        optimizer: builds the optimizer.
        scheduler: builds the scheduler, or None.
        closure: whether the optimizer is stepped with a closure.
        plain_model: builds the model of the plain process, where torch's own has a fault.
    """

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    closure: bool = False
    plain_model: Callable[[], nn.Module] | None = None


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    words = torch.randint(0, WORDS, (ROWS, 3), generator=generator)
    y = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return TensorDataset(x, words, y)


def train(case: Case, accelerator: Accelerator | None) -> dict[str, Any]:
    """Returns losses, final weights and buffers, and the output in evaluation, as plain tensors."""
    torch.manual_seed(0)
    build = case.model
    if accelerator is None and case.plain_model is not None:
        build = case.plain_model
    model = build().double()
    module = model
    optimizer = case.optimizer(list(model.parameters()))
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    loader = DataLoader(data(), BATCH)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        scheduler = accelerator.prepare(scheduler) if scheduler else None
    losses = []
    rates = []
    for _ in range(EPOCHS):
        for x, words, y in loader:

            def compute(x: Tensor = x, words: Tensor = words, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = (model(x, words) - y).square().mean()
                if accelerator is None:
                    loss.backward()
                else:
                    accelerator.backward(loss)
                return loss

            if case.closure:
                loss = optimizer.step(compute)
            else:
                loss = compute()
                optimizer.step()
            loss = torch.as_tensor(loss).detach()
            if accelerator is not None and not case.closure:
                loss = accelerator.reduce(loss, "mean")
            losses.append(float(loss))
            if scheduler is not None:
                if isinstance(getattr(scheduler, "scheduler", scheduler), torch.optim.lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(losses[-1])
                else:
                    scheduler.step()
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
    if accelerator is None:
        state = module.state_dict()
    else:
        state = accelerator.get_state_dict(model)
    state = {name: value.clone() for name, value in state.items()}
    # Afterwards, since an embedding with `max_norm` changes its weight in evaluation, too.
    model.eval()
    with torch.no_grad():
        x, words, _ = data()[:BATCH]
        evaluated = model(x, words)
    return {"losses": losses, "rates": rates, "state": state, "eval": evaluated.clone()}


def apart(got: dict[str, Any], want: dict[str, Any]) -> float:
    """The largest difference of two results of `train`."""
    worst = 0.0
    pairs = [(got["eval"], want["eval"])]
    pairs.append((torch.tensor(got["losses"]), torch.tensor(want["losses"])))
    pairs.append((torch.tensor(got["rates"]), torch.tensor(want["rates"])))
    assert list(got["state"]) == list(want["state"]), (list(got["state"]), list(want["state"]))
    pairs += [(got["state"][name], value) for name, value in want["state"].items()]
    for mine, theirs in pairs:
        if mine.numel():
            difference = (mine.double() - theirs.double()).abs().max().item()
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def outcome(case: Case, want: dict[str, Any] | Exception, accelerator: Accelerator) -> str:
    """Trains a case under a plan and compares. Ranks: all; each gets its own answer."""
    try:
        got = train(case, accelerator)
    except PacelineError as error:
        return f"refused {error.code}"
    except Exception as error:  # what the sweep looks for
        if isinstance(want, Exception) and type(error) is type(want):
            return "as torch"
        return f"RAW {type(error).__name__}: {str(error)[:300]}"
    if isinstance(want, Exception):
        return "runs, and torch refuses it"
    explained = accelerator.plan.explain()
    difference = apart(got, want)
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, {"eval": got["eval"], "state": got["state"]})
    blank = {"losses": [], "rates": []}
    spread = max(apart({**other, **blank}, {**everything[0], **blank}) for other in everything)
    named = "random_layers(" in explained or "buffers(" in explained
    if spread > 0 and not ("random_layers(" in explained and spread < TOLERANCE):
        return f"WRONG replicas differ by {spread:.2g}"
    # LBFGS divides by differences of gradients, which enlarges their rounding.
    tolerance = 1e-7 if case.name.startswith("LBFGS") else TOLERANCE
    if difference > tolerance or difference != difference:
        return "named" if named else f"WRONG by {difference:.2g}"
    together = "batch_layers(" in explained or "batch_norm.statistics = synced" in explained
    return "synchronised" if together else "exact"


def sweep(cases: list[Case], plan: str, width: int, timeout_s: float = 120) -> dict[str, str]:
    """Runs the cases under one plan in ONE group of processes, and returns the outcome of each."""
    torch.set_num_threads(1)
    wanted: dict[str, Any] = {}
    for case in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                wanted[case.name] = train(case, None)
            except Exception as error:  # as torch refuses its option `capturable` on the CPU
                wanted[case.name] = error

    def ranks() -> dict[str, str]:
        warnings.simplefilter("ignore")
        outcomes = {}
        # What was imported needs no look; without this, a collection takes longer than a case.
        gc.freeze()
        # One for all cases: each makes process groups with threads of their own, and after 50 of them nothing else would run.
        accelerator = Accelerator(cpu=True, split_batches=True, plan=PLANS[plan](width))
        draft = accelerator.run.plan
        for case in cases:
            outcomes[case.name] = outcome(case, wanted[case.name], accelerator)
            accelerator.free_memory()
            accelerator.run.plan = draft  # without what the plan says of this model
            # A step of any optimizer is told to all runs that are referenced still.
            gc.collect()
        return outcomes

    answers = run_ranks(ranks, world=width, timeout_s=timeout_s, output=[])
    result = {}
    for case in cases:
        seen = {answer[case.name] for answer in answers}
        result[case.name] = seen.pop() if len(seen) == 1 else " | ".join(sorted(seen))
    return result
