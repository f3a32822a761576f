"""Every module, optimizer, scheduler and loader of torch's: as the tables in docs/concepts/torch-*.md say."""

import datetime
import inspect
import random
import runpy
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import data
from torch_sweep import loaders
from torch_sweep.loaders import LOADERS
from torch_sweep.modules import LEFT_OUT, MODULES
from torch_sweep.optimizers import AVERAGES, OPTIMIZERS, SCHEDULERS
from torch_sweep.outcomes import KINDS, known
from torch_sweep.runs import plans_of, sweep

# How many cases are drawn each day for each number of processes. `make sweep` tries all of them under all plans.
DRAWN = {1: 20, 2: 15, 3: 5}
LOADERS_DRAWN = {1: 2, 2: 2, 3: 1}
# What was wrong once is tried each day: the name, the plan and the number of processes.
ALWAYS = {
    ("BatchNorm1d(2)", "recompute", 1),
    ("utils.spectral_norm", "recompute", 1),
    ("LazyBatchNorm1d()", "recompute", 1),
    ("BatchNorm1d(2, momentum=None)", "recompute", 2),
    ("Embedding(max_norm)", "tp", 2),
    ("utils.spectral_norm", "shard, bf16", 2),
    ("parametrizations.spectral_norm", "shard, bf16", 2),
    ("SyncBatchNorm(2)", "tp", 2),
    ("Adam(closure)", "zero 1", 2),
    ("Adam(closure)", "zero 2", 2),
    ("LBFGS(max_iter=4, line_search_fn=strong_wolfe, closure)", "replicate", 2),
}
LOADERS_ALWAYS = {("num_workers=2, in_order=False", 2), ("ChainDataset", 2)}
PAGES = Path(__file__).parents[4] / "docs" / "list_torch_layers.py"


def names_of(cases):
    return {case.name.split("(")[0].split(",")[0] for case in cases}


def classes(module, base):
    return {name for name, value in vars(module).items() if inspect.isclass(value) and issubclass(value, base)}


def test_every_class_has_a_case() -> None:
    assert classes(nn, nn.Module) - LEFT_OUT - names_of(MODULES) == set()
    assert classes(torch.optim, torch.optim.Optimizer) - {"Optimizer"} - names_of(OPTIMIZERS) == set()
    base = torch.optim.lr_scheduler.LRScheduler
    schedulers = classes(torch.optim.lr_scheduler, base) - {"LRScheduler", "_LRScheduler"}
    assert schedulers - names_of(SCHEDULERS) == set()
    assert names_of(AVERAGES) == {"AveragedModel"}
    samplers = {name.split(" ")[0] for name in names_of(LOADERS["samplers"])}
    assert classes(data, data.Sampler) - {"Sampler"} - samplers == set()
    datasets = {name.split(" ")[0] for name in names_of(LOADERS["datasets"])} | {"Dataset"}
    assert classes(data, data.Dataset) - datasets == {"DFIterDataPipe", "IterDataPipe", "MapDataPipe"}
    tried = " ".join(case.name for case in [*LOADERS["options"], *LOADERS["samplers"]])
    options = set(inspect.signature(data.DataLoader).parameters) - {"dataset", "pin_memory_device"}
    assert [option for option in options if option not in tried] == []


def test_nothing_ends_in_wrong_numbers_or_in_an_error_without_a_code() -> None:
    outcomes = known()
    for kind, cases in {**KINDS, **LOADERS}.items():
        assert set(outcomes[kind]) == {case.name for case in cases}
        for name, by_column in outcomes[kind].items():
            bad = [seen for seen in by_column.values() if "WRONG" in seen or "RAW" in seen or "runs, and" in seen]
            assert bad == [], name


def test_the_pages_have_the_tables_of_today(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(PAGES), "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PAGES), run_name="__main__")
    assert ended.value.code == 0


def of_today(everything, number):
    return random.Random(datetime.date.today().toordinal()).sample(everything, number)


@pytest.mark.parametrize("width", DRAWN)
def test_the_outcomes_are_those_of_the_table(width) -> None:
    cases = [
        (case, plan) for kind, of_kind in KINDS.items() for case in of_kind for plan in plans_of(kind, width, case)
    ]
    expected = {}
    for outcomes in known().values():
        expected |= {(name, plan): seen for name, by_plan in outcomes.items() for plan, seen in by_plan.items()}
    chosen = [(case, plan) for case, plan in cases if (case.name, plan, width) in ALWAYS]
    chosen += [drawn for drawn in of_today(cases, DRAWN[width]) if drawn not in chosen]
    seen = sweep(chosen, width)
    # Outcomes that differ between widths stand side by side.
    assert {key: value for key, value in seen.items() if value not in expected[key].split(" / ")} == {}


@pytest.mark.parametrize("width", LOADERS_DRAWN)
def test_loaders_read_what_the_table_says(width, tmp_path) -> None:
    expected = {name: by_width[str(width)] for kind in LOADERS for name, by_width in known()[kind].items()}
    cases = [case for kind in LOADERS.values() for case in kind]
    chosen = [case for case in cases if (case.name, width) in LOADERS_ALWAYS]
    chosen += [drawn for drawn in of_today(cases, LOADERS_DRAWN[width]) if drawn not in chosen]
    seen = loaders.sweep(chosen, width, tmp_path)
    assert {name: value for name, value in seen.items() if value != expected[name]} == {}
