"""What people type: arguments of the public API that cannot be, each with a coded error and the right fix."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import ChainDataset, DataLoader, TensorDataset

import paceline
from paceline import Accelerator, Keep, PacelineError


def parts():
    model = nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.ones(4, 4), torch.ones(4, 1)), 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def accelerator(**arguments):
    return Accelerator(cpu=True, **arguments)


def prepare(*objects, options=None, **arguments):
    accelerator(options=options).prepare(*objects, **arguments)


def prepare_again(number):
    model, optimizer, _ = parts()
    earlier = accelerator()
    prepared = earlier.prepare(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    earlier.free_memory()
    earlier.prepare(prepared[number])


def prepare_with_new_weight():
    model, optimizer, _ = parts()
    model.weight = torch.nn.Parameter(torch.zeros_like(model.weight))
    prepare(model, optimizer)


def accumulation(steps):
    accelerator().gradient_accumulation_steps = steps


LOSS = torch.ones((), requires_grad=True)
MISTAKES = {
    # keywords
    "Accelerator": (lambda: Accelerator(mixed_precison="bf16"), "argument-unknown", "write mixed_precision="),
    "prepare": (lambda: prepare(*parts(), device_plcement=[True]), "argument-unknown", "write device_placement="),
    "save_state": (lambda: accelerator().save_state(totl_limit=3), "argument-unknown", "leave totl_limit out"),
    "load_state": (lambda: accelerator().load_state(stict=True), "argument-unknown", "write strict="),
    "resume": (lambda: accelerator().resume(epoch=3), "argument-unknown", "leave epoch out"),
    "accumulate": (lambda: accelerator().accumulate(model=None), "argument-unknown", "accumulate(model)"),
    "backward": (lambda: accelerator().backward(LOSS, retan_graph=True), "argument-unknown", "write retain_graph="),
    "gather": (lambda: accelerator().gather_for_metrics(LOSS, use_gather=True), "argument-unknown",
               "write use_gather_object="),
    "profile": (lambda: accelerator().profile(activites=["cpu"]), "argument-unknown", "write activities="),
    "set_seed": (lambda: paceline.set_seed(0, determinstic=True), "argument-unknown", "write deterministic="),
    "LocalSGD": (lambda: paceline.LocalSGD(None, None, local_sgd_step=3), "argument-unknown", "write local_sgd_steps="),
    "batch size": (lambda: paceline.find_executable_batch_size(batch_size=3), "argument-unknown",
                   "write starting_batch_size="),
    "skip": (lambda: paceline.skip_first_batches(parts()[2], num=3), "argument-unknown", "leave num out"),
    "logger": (lambda: paceline.get_logger("name", level="INFO"), "argument-unknown", "write log_level="),
    "notebook": (lambda: paceline.debug_launcher(print, num_process=2), "argument-unknown", "write num_processes="),
    "Keep": (lambda: Keep(lst=3), "argument-unknown", "write last="),
    # how many checkpoints
    "limit of text": (lambda: accelerator(total_limit="three"), "checkpoint-keep", "write a number such as 3"),
    "limit of yes": (lambda: accelerator(total_limit=True), "checkpoint-keep", "write a number such as 3"),
    "limit of none": (lambda: accelerator(total_limit=0), "checkpoint-keep", "write a number such as 3"),
    "keep of a number": (lambda: accelerator(keep=3), "checkpoint-keep", "write total_limit=3"),
    "keep of text": (lambda: accelerator(keep="last"), "checkpoint-keep", "write keep=Keep(last=3)"),
    "rule of text": (lambda: Keep(every="epoch"), "checkpoint-keep", "write a number such as 3"),
    # objects
    "list": (lambda: prepare([*parts()]), "prepare-kind", "write `prepare(*objects)`"),
    "tuple": (lambda: prepare(parts()), "prepare-kind", "write `prepare(*objects)`"),
    "dict": (lambda: prepare({"model": parts()[0]}), "prepare-kind", "write `prepare(*objects.values())`"),
    "class": (lambda: prepare(torch.optim.SGD), "prepare-kind", "construct it first: `sgd = SGD(...)`"),
    "dataset": (lambda: prepare(parts()[2].dataset), "prepare-kind", "`DataLoader(dataset, batch_size=32)`"),
    "text": (lambda: prepare(parts()[0], "bf16"), "prepare-kind", "leave it out of the call"),
    "numbers": (lambda: prepare([1, 2, 3]), "prepare-kind", "leave it out of the call"),
    "parameters": (lambda: prepare(parts()[0].parameters()), "prepare-kind", "pass the model"),
    "list of parameters": (lambda: prepare([*parts()[0].parameters()]), "prepare-kind", "pass the model"),
    "state_dict": (lambda: prepare(parts()[0].state_dict()), "prepare-kind", "pass the model"),
    "class of loaders": (lambda: prepare(DataLoader), "prepare-kind", "construct it first"),
    "sampler": (lambda: prepare(parts()[2].sampler), "prepare-kind", "sampler=sampler"),
    "iterator": (lambda: prepare(iter(parts()[2])), "prepare-kind", "pass the DataLoader itself"),
    "generator": (lambda: prepare(batch for batch in [1]), "prepare-kind", "write an IterableDataset"),
    "stream": (lambda: prepare(ChainDataset([])), "prepare-kind", "`DataLoader(dataset, batch_size=32)`"),
    "range": (lambda: prepare(range(3)), "data-loader-kind", "DataLoader(dataset, batch_size=...)"),
    "no optimizer": (lambda: prepare(SimpleNamespace(step=print, zero_grad=print)), "prepare-kind", "inherit from torch.optim"),
    "scaler": (lambda: prepare(torch.amp.GradScaler("cpu")), "prepare-kind", 'mixed_precision="fp16"'),
    "wrapped model": (lambda: prepare(torch.nn.DataParallel(parts()[0])), "prepare-kind", "remove the line that calls DataP"),
    "named model": (lambda: prepare(model=parts()[0]), "argument-unknown", "pass the values without names: prepare(model)"),
    "replaced layer": (lambda: prepare_with_new_weight(), "optimizer-parameters", "construct it after that"),
    "optimizer of before": (lambda: prepare_again(1), "prepare-forgotten", "`optimizer.optimizer`"),
    "scheduler of before": (lambda: prepare_again(2), "prepare-forgotten", "`scheduler.scheduler`"),
    "short placement": (lambda: prepare(*parts(), device_placement=[True]), "prepare-placement", "[True, True, True]"),
    "one placement": (lambda: prepare(*parts(), device_placement=False), "prepare-placement", "[True, True, True]"),
    # options and settings
    "idle value": (lambda: prepare(*parts(), options={"pipeline": {"schedule": "foo"}}), "strategy-value", "then 1f1b"),
    "idle name": (lambda: prepare(*parts(), options={"pipeline": {"schedle": "1f1b"}}), "strategy-option",
                  "write 'schedule'"),
    "no strategy": (lambda: prepare(*parts(), options={"pipelin": {"split": "auto"}}), "plan-option", "write 'pipeline'"),
    "plan of a number": (lambda: accelerator(plan=3), "config-value", 'plan={"shard": 2, "zero": 1}'),
    "plan of a list": (lambda: accelerator(plan=["tp"]), "config-value", 'plan={"shard": 2, "zero": 1}'),
    "idle scaler": (lambda: accelerator(scaler={"init_scal": 1.0}), "scaler-option", "write 'init_scale'"),
    "scale of text": (lambda: accelerator(scaler={"init_scale": "big"}), "scaler-option", "leave it out for 65536.0"),
    "no accumulation": (lambda: accumulation(0), "plan-accumulate", "1 or more"),
}  # fmt: skip


OF_LARGE = ("LocalSGD", "idle value", "idle name", "no strategy")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.needs("large")] if name in OF_LARGE else []) for name in MISTAKES],
)
def test_a_mistake_has_a_code_and_the_right_fix(name):
    mistake, code, fix = MISTAKES[name]
    with pytest.raises(PacelineError) as caught:
        mistake()
    (problem,) = caught.value.problems
    assert problem.code == code
    assert problem.why and fix in problem.fix, str(caught.value)


@pytest.mark.needs("large")
def test_good_options_of_an_idle_strategy_are_said_to_have_no_effect():
    run = accelerator(options={"pipeline": {"schedule": "gpipe"}})
    run.prepare(*parts())
    assert "options.pipeline.schedule = gpipe" in run.plan.explain()
    assert "no effect: this plan does not use pipeline" in run.plan.explain()


def test_what_is_optional_may_be_none():
    model, _, loader = parts()
    model, optimizer, loader = accelerator().prepare(model, None, loader)
    assert optimizer is None
