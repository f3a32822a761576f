"""Plans and models that cannot work: refused before anything is touched, all problems at once, alike on every rank."""

import os
import subprocess
from textwrap import dedent

import pytest
import torch
from parity_models import GPT
from torch import nn
from torch._subclasses import FakeTensorMode
from warm_python import executable

from paceline import Accelerator, PacelineError
from paceline.testing import run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def net(blocks=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(Block() for _ in range(blocks))), nn.Linear(4, 1))


def sgd(model, **named):
    return torch.optim.SGD(model.parameters(), lr=0.1, **named)


def raised(make, *, untouched=None):
    """What `make()` raises on each of two ranks: codes and text; checks that `untouched()` is a plain model still."""

    def work():
        with pytest.raises(PacelineError) as caught:
            make()
        if untouched is not None:
            model = untouched()
            assert {type(p) for p in model.parameters()} == {nn.Parameter}
            assert "forward" not in vars(model)
        return [problem.code for problem in caught.value.problems], str(caught.value)

    first, second = run_ranks(work, world=2, timeout_s=30)
    assert first == second
    codes, text = first
    for code in codes:
        assert text.count(f"[{code}]") == codes.count(code)
    assert text.count("\n  fix: ") == text.count("\n  why: ") == len(codes)
    return codes, text


def elsewhere(layer, device):
    """The layer, on a device that need not exist: its parameters hold no values."""
    with FakeTensorMode():
        for name, parameter in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(torch.empty(parameter.shape, device=device)))
    return layer


def on_several_devices():
    model = net()
    elsewhere(model[0], "cuda:1")
    return model


# -- the layout -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [{"replicate": 3}, {"shard": 2, "tp": 2}, {"shard": 4}, {"pp": 2, "cp": 3}])
def test_widths_that_do_not_multiply_to_the_number_of_processes(plan):
    codes, text = raised(lambda: Accelerator(cpu=True, plan=plan))
    assert codes == ["plan-size"]
    assert "but there are 2" in text
    for axis, width in plan.items():
        assert f"{axis}={width}" in text


def test_every_problem_of_the_draft_is_told_at_once():
    codes, _ = raised(
        lambda: Accelerator(cpu=True, plan={"shard": 3}, gradient_accumulation_steps=1, mixed_precision="bf16")
    )
    assert codes == ["plan-size"]


class Stack(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


STAGES = {
    "a split that matches nothing": ({"split": "layers.2"}, 4, "pipeline-split"),
    "blocks that match nothing": ({"blocks": "layers.*"}, 4, "pipeline-pattern"),
    "a first stage without blocks": ({"split": "blocks.0"}, 4, "pipeline-split"),
    "more stages than blocks": ({}, 1, "pipeline-blocks"),
}


@pytest.mark.parametrize("case", STAGES)
def test_stages_that_would_be_empty(case):
    options, blocks, code = STAGES[case]
    made = {}

    def work():
        made["model"] = Stack(blocks)
        Accelerator(cpu=True, plan={"pp": 2}, options={"pipeline": options}).prepare(made["model"])

    codes, text = raised(work, untouched=lambda: made["model"])
    assert codes == [code]
    assert "blocks" in text


# -- what cannot go together ------------------------------------------------------------------------------------------

COMBINATIONS = {
    "zero without shards": ({"zero": 2, "shard": 1}, ["plan-zero"], "leave `shard` out"),
    "divided matrices and compiled blocks": (
        {"tp": 2, "compile": True},
        ["tensor-heads", "tensor-width", "compile-tensor"],
        "leave compile at no",
    ),
    "divided sequences and compiled blocks": ({"cp": 2, "compile": True}, ["context-compile"], "set compile to no"),
    "heads and widths that two ranks cannot share": ({"tp": 2}, ["tensor-heads", "tensor-width"], "use tp = "),
}


@pytest.mark.parametrize("case", COMBINATIONS)
def test_combinations_that_cannot_work_name_one_that_does(case):
    plan, expected, fix = COMBINATIONS[case]
    made = {}

    def work():
        made["model"] = model = GPT(layers=2, width=15, heads=3)
        for block in model.blocks:
            block.up_proj, block.down_proj = nn.Linear(15, 21), nn.Linear(21, 15)
        Accelerator(cpu=True, plan=plan).prepare(model)

    codes, text = raised(work, untouched=lambda: made.get("model", nn.Linear(1, 1)))
    assert codes == expected
    assert fix in text


# -- optimizers -----------------------------------------------------------------------------------------------------


def two_optimizers(plan, start=False):
    accelerator = Accelerator(cpu=True, plan=plan)
    model = net()
    return accelerator, model, sgd(model), sgd(model, momentum=0.9)


@pytest.mark.parametrize("plan", [{"replicate": 2}, {"shard": 2}], ids=str)
def test_a_parameter_in_two_optimizers(plan):
    made = {}

    def together():
        accelerator, made["model"], *optimizers = two_optimizers(plan)
        accelerator.prepare(made["model"], *optimizers)

    codes, text = raised(together, untouched=lambda: made["model"])
    assert codes == ["optimizer-shared"]
    assert "SGD and SGD hold the same 12 parameters: 0.bias, 0.weight" in text


def test_a_parameter_in_a_second_optimizer_prepared_later():
    def later():
        accelerator = Accelerator(cpu=True)
        model, _ = accelerator.prepare(model := net(), sgd(model))
        accelerator.prepare_optimizer(sgd(accelerator.unwrap_model(model)[0]))

    codes, text = raised(later)
    assert codes == ["optimizer-shared"]
    assert "the same 2 parameters: 0.bias, 0.weight" in text


def test_the_same_optimizer_twice_and_disjoint_ones_are_fine():
    def work():
        accelerator = Accelerator(cpu=True)
        model = net()
        first, second = sgd(model[0]), sgd(model[1])
        model, one, other, again = accelerator.prepare(model, first, second, first)
        return one is again and one is accelerator.prepare_optimizer(first) and other is not one

    assert run_ranks(work, world=2) == [True, True]


def test_an_optimizer_that_has_states_on_one_rank():
    made = {}

    def work():
        made["model"] = model = net()
        optimizer = sgd(model, momentum=0.9)
        if int(os.environ["RANK"]) == 0:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        Accelerator(cpu=True, plan={"replicate": 2}).prepare(model, optimizer)

    codes, text = raised(work, untouched=lambda: made["model"])
    assert codes == ["optimizer-started"]
    assert "of 12 parameters on rank 0, and of 0 on rank 1" in text


def test_a_parameter_of_no_module_where_ranks_divide_layers():
    def work():
        Accelerator(cpu=True, plan={"tp": 2}).prepare(nn.Parameter(torch.zeros(())))

    codes, text = raised(work)
    assert codes == ["prepare-kind"]
    assert "tp=2" in text


# -- where a model lies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [{"replicate": 2}, {"shard": 2}], ids=str)
def test_a_model_on_several_devices(plan):
    codes, text = raised(lambda: Accelerator(cpu=True, plan=plan).prepare(on_several_devices()))
    assert codes == ["model-device"]
    assert "cpu, cuda:1" in text


def test_a_model_that_stays_on_another_device():
    def work():
        Accelerator(cpu=True).prepare_model(elsewhere(nn.Linear(4, 1), "cuda:0"), device_placement=False)

    codes, text = raised(work)
    assert codes == ["model-device"]
    assert "its tensors are on cuda:0; this rank computes on cpu" in text


def test_problems_of_objects_and_of_the_plan_come_together():
    def work():
        model = on_several_devices()
        options = {"replicate": {"bucket_cap_mb": -1, "no_such": 1}, "nobody": {"x": 1}}
        Accelerator(cpu=True, options=options).prepare(model, sgd(model), sgd(model))

    codes, text = raised(work)
    assert sorted(codes) == ["model-device", "optimizer-shared", "plan-option", "strategy-option", "strategy-value"]
    assert text.startswith("5 problems:\n1. ")


def test_a_second_model_under_a_plan_whose_ranks_would_read_other_samples():
    def work():
        accelerator = Accelerator(cpu=True, plan={"replicate": 2})
        accelerator.prepare_model(net(), plan={"tp": 2})

    codes, text = raised(work)
    assert codes == ["plan-width"]
    assert "replicate 2 and under tp 2" in text


# -- told once ----------------------------------------------------------------------------------------------------------


def launched(folder, script, *words):
    path = folder / "train.py"
    path.write_text(dedent(script))
    command = [executable(), "-m", "paceline.cli.main", "launch", "--procs", "2", "--cpu", *words, str(path)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE")}
    env = {**kept, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=90)


def test_what_is_wrong_is_printed_once_and_not_by_every_rank(tmp_path):
    script = """
        import torch
        from torch import nn
        from paceline import Accelerator

        accelerator = Accelerator(options={"nobody": {"x": 1}})
        model = nn.Linear(4, 1)
        one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
        accelerator.prepare(model, one, other)
        """
    done = launched(tmp_path, script)
    assert done.returncode == 1
    assert done.stderr.count("[optimizer-shared]") == done.stderr.count("[plan-option]") == 1, done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "accelerator.prepare(model, one, other)" in done.stderr
    done = launched(tmp_path, script, "--shard", "3")
    assert done.returncode != 0
    assert done.stderr.count("[plan-size]") == 1, done.stderr
