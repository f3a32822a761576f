"""Every module, optimizer and scheduler of torch's: as the table in docs/concepts/torch-layers.md says."""

import inspect

import pytest
import torch
from torch import nn
from torch_sweep.modules import LEFT_OUT, MODULES
from torch_sweep.optimizers import OPTIMIZERS, SCHEDULERS
from torch_sweep.outcomes import KINDS, known
from torch_sweep.runs import PLANS, sweep

# Every second case, each under one plan. `make sweep` tries all cases under all plans and widths.
EACH = 8
GROUPS = [("replicate", 2), ("zero 1", 2), ("zero 2", 2), ("shard", 2)]
OPEN = {"LBFGS(line_search_fn=strong_wolfe, closure)"}  # another weight by 2.5e-4 on two processes


def names_of(cases):
    return {case.name.split("(")[0] for case in cases}


def classes(module, base):
    return {name for name, value in vars(module).items() if inspect.isclass(value) and issubclass(value, base)}


def test_every_class_has_a_case() -> None:
    assert classes(nn, nn.Module) - LEFT_OUT - names_of(MODULES) == set()
    assert classes(torch.optim, torch.optim.Optimizer) - {"Optimizer"} - names_of(OPTIMIZERS) == set()
    base = torch.optim.lr_scheduler.LRScheduler
    schedulers = classes(torch.optim.lr_scheduler, base) - {"LRScheduler", "_LRScheduler"}
    assert schedulers - names_of(SCHEDULERS) == set()


def test_nothing_ends_in_wrong_numbers_or_in_an_error_without_a_code() -> None:
    for kind, cases in KINDS.items():
        outcomes = known()[kind]
        assert set(outcomes) == {case.name for case in cases}
        for name, by_plan in outcomes.items():
            assert set(by_plan) <= set(PLANS)
            bad = any("WRONG" in outcome or "RAW" in outcome for outcome in by_plan.values())
            assert bad == (name in OPEN), (name, by_plan)


@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_the_outcomes_are_those_of_the_table(number) -> None:
    plan, width = GROUPS[number]
    expected = {}
    chosen = []
    for kind, cases in KINDS.items():
        part = [case for case in cases[number::EACH] if plan in known()[kind][case.name] and case.name not in OPEN]
        chosen += part
        expected |= {case.name: known()[kind][case.name][plan] for case in part}
    seen = sweep(chosen, plan, width)
    # Outcomes that differ between widths stand side by side.
    assert {name: value for name, value in seen.items() if value not in expected[name].split(" / ")} == {}
