"""Trains one case in plain PyTorch and through `Accelerator`, and says in one word how both compare.

exact           the losses, weights, buffers and evaluation of one plain process, to 1e-10 in float64; on one process to the
                last bit, with the state of the random generator
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
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

from paceline import Accelerator
from paceline.base.errors import PacelineError
from paceline.testing import run_ranks
from paceline.world.sharded import whole

ROWS, BATCH, FEATURES, WORDS, EPOCHS = 12, 6, 12, 12, 2
TOLERANCE = 1e-10
# Products are rounded to 8 bits, and on several processes gradients are rounded before they are added up.
LOW_PRECISION_TOLERANCE = 0.05


class Twins(nn.Module):
    """Two models of one class, the outputs added: the repeated blocks that `recompute` needs."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([build(), build()])

    def forward(self, x: Tensor, words: Tensor | None = None) -> Tensor:
        first, second = self.blocks
        return first(x, words) + second(x, words)


@dataclass(frozen=True)
class Plan:
    """A plan under which every case is trained.

    Attributes:
        settings: of the plan on `width` processes.
        options: of strategies, for a case.
        widths: the numbers of processes on which it is tried.
        twins: whether the model is two of the case's.
        precision: "bf16" for weights in float32 and `torch.autocast`; else everything is in float64.
        kinds: of the cases that are tried; all of them if there is none.
    """

    settings: Callable[[int], dict[str, Any]]
    options: Callable[[Case], dict[str, Any]] = lambda case: {}
    widths: tuple[int, ...] = (2, 3)
    twins: bool = False
    precision: str = "no"
    kinds: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "no" else torch.float32

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.precision == "no" else LOW_PRECISION_TOLERANCE


@dataclass(frozen=True)
class Case:
    """One thing of torch's in a training loop.

    Attributes:
        name: as torch writes it, with the options.
        model: builds the model, which is called with x [rows, FEATURES] and words [rows, 3] and returns one value a row.
        optimizer: builds the optimizer.
        scheduler: builds the scheduler, or None.
        closure: whether the optimizer is stepped with a closure.
        average: builds an average of the weights from the model, or None.
        updates_statistics: whether `update_bn` runs on the average at the end, which calls it with x alone.
        plain_model: builds the model of the plain process, where torch's own has a fault.
        divided: how `tp` divides layers, by patterns of their names.
    """

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    closure: bool = False
    average: Callable[[nn.Module], nn.Module] | None = None
    updates_statistics: bool = False
    plain_model: Callable[[], nn.Module] | None = None
    divided: dict[str, str] = field(default_factory=lambda: {"first": "rowwise_split"})


PLANS: dict[str, Plan] = {
    "one process": Plan(lambda width: {}, widths=(1,)),
    "replicate": Plan(lambda width: {"replicate": width}),
    "zero 1": Plan(lambda width: {"shard": width, "zero": 1}),
    "zero 2": Plan(lambda width: {"shard": width, "zero": 2}),
    "shard": Plan(lambda width: {"shard": width, "zero": 3}),
    "tp": Plan(lambda width: {"tp": width}, lambda case: {"tensor": {"plan": case.divided}}),
    "recompute": Plan(lambda width: {"replicate": width, "recompute": "blocks"}, widths=(1, 2, 3), twins=True),
    "bf16": Plan(lambda width: {"replicate": width}, widths=(1, 2), precision="bf16", kinds=("modules",)),
}


def plans_of(kind: str, width: int) -> list[str]:
    """The names of the plans under which cases of a kind are tried on so many processes."""
    return [name for name, plan in PLANS.items() if width in plan.widths and (not plan.kinds or kind in plan.kinds)]


# Under these, ranks read different samples and hold the same model.
DATA_PARALLEL = ("replicate", "zero 1", "zero 2", "shard")


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    words = torch.randint(0, WORDS, (ROWS, 3), generator=generator)
    y = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return TensorDataset(x.to(dtype), words, y.to(dtype))


def train(case: Case, plan: Plan, accelerator: Accelerator | None, mended: bool = False) -> dict[str, Any]:
    """Returns losses, final weights and buffers, and the output in evaluation, as plain tensors.

    Args:
        case: what is trained.
        plan: under which it is trained.
        accelerator: None for plain PyTorch.
        mended: whether to take the model without torch's fault, if there is one.
    """
    torch.manual_seed(0)
    build = case.model
    if mended and case.plain_model is not None:
        build = case.plain_model
    model = Twins(build) if plan.twins else build()
    model = model.to(plan.dtype)
    module = model
    average = case.average(model) if case.average else None
    optimizer = case.optimizer(list(model.parameters()))
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    loader = DataLoader(data(plan.dtype), BATCH)
    if accelerator is not None:
        model, average, optimizer, loader = accelerator.prepare(model, average, optimizer, loader)
        scheduler = accelerator.prepare(scheduler) if scheduler else None
    in_plain_bf16 = plan.precision == "bf16" and accelerator is None
    losses = []
    rates = []
    for _ in range(EPOCHS):
        for x, words, y in loader:

            def compute(x: Tensor = x, words: Tensor = words, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=in_plain_bf16):
                    output = model(x, words)
                # Paceline gives outputs in the precision of the weights.
                loss = (output.to(plan.dtype) - y).square().mean()
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
            if average is not None:
                average.update_parameters(model)
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
    if average is not None:
        if case.updates_statistics:
            update_bn(loader, average)
        model = average
        module = average
    state = module.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    state = {name: value.clone() for name, value in state.items()}
    # Afterwards, since an embedding with `max_norm` changes its weight in evaluation, too.
    model.eval()
    with torch.no_grad():
        x, words, _ = data(plan.dtype)[:BATCH]
        with torch.autocast("cpu", torch.bfloat16, enabled=in_plain_bf16):
            evaluated = whole(model(x, words)).to(plan.dtype)
    return {
        "losses": losses,
        "rates": rates,
        "state": state,
        "eval": evaluated.clone(),
        "generator": torch.get_rng_state(),
    }


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


def outcome(case: Case, plan: Plan, want: dict[str, Any] | Exception, accelerator: Accelerator) -> str:
    """Trains a case under a plan and compares. Ranks: all; each gets its own answer."""
    try:
        got = train(case, plan, accelerator)
    except PacelineError as error:
        return f"refused {error.code}"
    except Exception as error:  # what the sweep looks for
        # `want` may be that of a model without torch's fault.
        alone = want if isinstance(want, Exception) else plain(case, plan, width=1)
        if isinstance(alone, Exception) and type(error) is type(alone):
            return "as torch"
        return f"RAW {type(error).__name__}: {str(error)[:300]}"
    if isinstance(want, Exception):
        return "runs, and torch refuses it"
    explained = accelerator.plan.explain()
    difference = apart(got, want)
    if accelerator.num_processes == 1:
        same_draws = torch.equal(got["generator"], want["generator"])
        return "exact" if difference == 0 and same_draws else f"WRONG by {difference:.2g} on one process"
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, {"eval": got["eval"], "state": got["state"]})
    blank = {"losses": [], "rates": []}
    spread = max(apart({**other, **blank}, {**everything[0], **blank}) for other in everything)
    named = "random_layers(" in explained or "buffers(" in explained
    if spread > 0 and not ("random_layers(" in explained and spread < plan.tolerance):
        return f"WRONG replicas differ by {spread:.2g}"
    if difference > plan.tolerance:
        return "named" if named else f"WRONG by {difference:.2g}"
    together = "batch_layers(" in explained or "batch_norm.statistics = synced" in explained
    return "synchronised" if together else "exact"


def plain(case: Case, plan: Plan, width: int) -> dict[str, Any] | Exception:
    """Returns what one plain process computes, or its error, as torch refuses its option `capturable` on the CPU."""
    # Where ranks read different samples, layers that see a batch are replaced.
    mended = width > 1 and "tp" not in plan.settings(width)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return train(case, plan, None, mended)
        except Exception as error:
            return error


def sweep(
    chosen: list[tuple[Case, str]], width: int, timeout_s: float = 120, output: list[str] | None = None
) -> dict[tuple[str, str], str]:
    """Runs cases, each under a plan, in ONE group of processes.

    Returns:
        The outcome by the names of the case and of the plan.
    """
    torch.set_num_threads(1)

    def key_of(case: Case, name: str) -> tuple[object, ...]:
        return (case.name, PLANS[name].twins, PLANS[name].precision, name == "tp")

    wanted: dict[tuple[object, ...], Any] = {}
    for case, name in chosen:
        key = key_of(case, name)
        if key not in wanted:
            wanted[key] = plain(case, PLANS[name], width)

    def ranks() -> dict[tuple[str, str], str]:
        warnings.simplefilter("ignore")
        outcomes = {}
        # What was imported needs no look; without this, a collection takes longer than a case.
        gc.freeze()
        for name in dict.fromkeys(name for _, name in chosen):
            plan = PLANS[name]
            accelerator = None
            options: dict[str, Any] = {}
            for case in [case for case, other in chosen if other == name]:
                # One for all cases of a plan: each makes process groups with threads of their own, and after 50 of them
                # nothing else would run.
                if accelerator is None or plan.options(case) != options:
                    options = plan.options(case)
                    accelerator = Accelerator(
                        cpu=True,
                        split_batches=True,
                        plan=plan.settings(width) or None,
                        options=options,
                        mixed_precision=plan.precision,
                    )
                    draft = accelerator.run.plan
                outcomes[case.name, name] = outcome(case, plan, wanted[key_of(case, name)], accelerator)
                accelerator.free_memory()
                accelerator.run.plan = draft  # without what the plan says of this model
                # A step of any optimizer is told to all runs that are referenced still.
                gc.collect()
        return outcomes

    # One process is started by hand, and not by a launcher.
    alone = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    answers = run_ranks(
        ranks,
        world=width,
        timeout_s=timeout_s,
        group=width > 1,
        env=alone if width == 1 else None,
        output=[] if output is None else output,
    )
    result = {}
    for key in answers[0]:
        seen = {answer[key] for answer in answers}
        result[key] = seen.pop() if len(seen) == 1 else " | ".join(sorted(seen))
    return result
