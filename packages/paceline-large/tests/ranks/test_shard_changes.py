"""Divided models that change, or are used, in ways that plain PyTorch allows: followed, or refused with a code."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
import torch.distributed.fsdp
from shared_ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from paceline import Accelerator, PacelineError

PLAN = {"shard": 2}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


def prepared(accelerator: Accelerator) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return tuple(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))


def train(accelerator, model, optimizer, steps: int = 2, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randn(4, 4, generator=generator).chunk(accelerator.num_processes)[accelerator.process_index]
        accelerator.backward((model(batch) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def code_of(work) -> str:
    try:
        work()
    except PacelineError as error:
        return error.code
    return "none"


# -- what is followed ----------------------------------------------------------------------------------------------------


def a_new_layer(accelerator):
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer)
    torch.manual_seed(5 + accelerator.process_index)  # rank 0's values count
    model.extra = nn.Linear(4, 4)
    optimizer.add_param_group({"params": model.extra.parameters()})
    model.head.register_forward_hook(lambda module, args, output: model.extra(output))
    with torch.no_grad():
        for parameter in model.extra.parameters():
            parameter.fill_(0.5)
    train(accelerator, model, optimizer)
    return model


def a_second_optimizer(accelerator):
    model, optimizer = prepared(accelerator)
    train(accelerator, model, optimizer)
    accelerator.clear()
    model, optimizer = accelerator.prepare(model, torch.optim.Adagrad(model.parameters(), lr=0.1))
    train(accelerator, model, optimizer)
    return model


def one_after_the_other(accelerator):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(optimizer)
    train(accelerator, model, optimizer)
    return model


def unfrozen_later(accelerator):
    torch.manual_seed(0)
    model = Net()
    model.body.requires_grad_(False)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.body, model.head)]
    model, *optimizers = accelerator.prepare(model, *optimizers)
    train(accelerator, model, optimizers[1])
    model.body.requires_grad_(True)
    for optimizer in optimizers:
        train(accelerator, model, optimizer)
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()
    return model


def cleared_between_forward_and_backward(accelerator):
    model, optimizer = prepared(accelerator)
    for step in range(3):
        loss = model(torch.full((2, 4), step + 1.0)).mean()
        model.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    return model


def a_registered_method(accelerator):
    model, optimizer = prepared(accelerator)
    if accelerator.num_processes > 1 and accelerator.plan.zero == 3:
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(model, "encode")
    return encoded(accelerator, model, optimizer)


def encoded(accelerator, model, optimizer):
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        batch = torch.randn(4, 4, generator=generator).chunk(accelerator.num_processes)[accelerator.process_index]
        accelerator.backward(model.encode(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return model


def a_method(accelerator):
    model, optimizer = prepared(accelerator)
    return encoded(accelerator, model, optimizer)


def a_method_of_a_compiled_model(accelerator):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled, optimizer = accelerator.prepare(torch.compile(model, backend="eager"), optimizer)
    return encoded(accelerator, compiled, optimizer)


class InBlocks(Net):
    """A model whose body is a unit of its own, and which writes its weights in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            for block in self.blocks:
                block.register_forward_pre_hook(clamp_weight)
            self.writes = False
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def clamp_weight(layer: nn.Module, _: object) -> None:
    layer.weight.data.clamp_(-0.2, 0.2)


def written_between(write, backward: bool = True):
    """A program that writes weights between a forward pass and its backward pass, or after a forward pass without one."""

    def program(accelerator):
        torch.manual_seed(0)
        model = InBlocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
        for step in range(3):
            loss = (model(torch.full((2, 4), step + 1.0)) - 1).square().mean()
            write(accelerator.unwrap_model(model))
            if not backward:
                loss = (model(torch.full((2, 4), step + 1.0)) - 1).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return model

    return program


def clamp_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def set_data(model: nn.Module) -> None:
    model.head.weight.data = model.head.weight.data * 0.5


def write_rows(model: nn.Module) -> None:
    model.head.weight.data[1:3] *= 2
    model.head.bias.detach()[0] = 3.0


def write_without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        model.head.weight.mul_(0.5)


def load(model: nn.Module) -> None:
    model.load_state_dict({name: torch.full(value.shape, 0.2) for name, value in model.state_dict().items()})


def load_layer(model: nn.Module) -> None:
    model.head.load_state_dict({"weight": torch.full((4, 4), 0.2), "bias": torch.zeros(4)})


def write_in_forward(model: nn.Module) -> None:
    model.writes = True


FOLLOWED = {
    program.__name__: program
    for program in (
        a_new_layer, a_second_optimizer, one_after_the_other, unfrozen_later, cleared_between_forward_and_backward,
        a_registered_method, a_method, a_method_of_a_compiled_model,
    )
} | {
    "clamped between": written_between(clamp_data),
    "set between": written_between(set_data),
    "rows written between": written_between(write_rows),
    "written after a pass": written_between(write_without_gradients, backward=False),
    "loaded after a pass": written_between(load, backward=False),
    "a layer loaded after a pass": written_between(load_layer, backward=False),
    "written in forward": written_between(write_in_forward),
}  # fmt: skip


def run_all(plan):
    torch.set_default_dtype(torch.float64)
    outcomes = {}
    for name, program in FOLLOWED.items():
        accelerator = Accelerator(cpu=True, plan=plan)
        try:
            model = program(accelerator)
            outcomes[name] = {key: value.clone() for key, value in accelerator.get_state_dict(model).items()}
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
        accelerator.free_memory()
    return outcomes


@pytest.mark.parametrize("plan", [PLAN, {"shard": 2, "zero": 1}, {"shard": 2, "zero": 2}], ids=str)
def test_followed_as_on_one_process(plan):
    (expected,) = run_ranks(run_all, 1, args=(None,))
    for outcome in run_ranks(run_all, 2, args=(plan,)):
        for name, state in expected.items():
            assert not isinstance(outcome[name], str), (name, outcome[name])
            for key, value in state.items():
                torch.testing.assert_close(
                    outcome[name][key], value, msg=lambda text, name=name, key=key: f"{name} {key} {text}"
                )


def test_reading_data_holds_one_tensor():
    def work():
        accelerator = Accelerator(cpu=True, plan=PLAN)
        model, _ = prepared(accelerator)
        model(torch.ones(2, 4)).sum()
        whole = model.head.weight
        before = len(tensors_of(whole))
        for _ in range(100):
            whole.data  # noqa: B018
        return len(tensors_of(whole)) - before

    def tensors_of(whole):
        address = whole.untyped_storage().data_ptr()
        tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        plain = [each for each in tensors if type(each) in (torch.Tensor, type(whole))]
        return [each for each in plain if each.untyped_storage().data_ptr() == address]

    assert run_ranks(work, 2) == [1, 1]


# -- what is refused -----------------------------------------------------------------------------------------------------


def test_refused_under_shard():
    def work():
        x = torch.ones(2, 4)
        accelerator = Accelerator(cpu=True, plan=PLAN)
        codes = []
        model, _ = prepared(accelerator)
        model.head.weight = model.body.weight
        codes.append(code_of(lambda: model(x)))
        accelerator.clear()

        model, _ = prepared(accelerator)
        del model.head.weight
        model.head.weight = torch.zeros(4, 4)  # as pruning leaves it
        codes.append(code_of(lambda: model(x)))
        accelerator.clear()

        model, _ = prepared(accelerator)
        if accelerator.is_main_process:
            model.eval()

        def some_evaluate():
            with torch.set_grad_enabled(not accelerator.is_main_process):
                model(x)

        codes.append(code_of(some_evaluate))
        accelerator.clear()

        model, _ = prepared(accelerator)

        def prune_whole():
            with accelerator.full_parameters(model, writeback=True):
                prune.l1_unstructured(model.head, "weight", 0.5)

        codes.append(code_of(prune_whole))
        accelerator.clear()

        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer)
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5  # torch loses it
        codes.append(code_of(lambda: train(accelerator, model, optimizer)))
        accelerator.clear()

        model, optimizer = prepared(accelerator)
        model.head.weight.data = torch.ones(4, 4)  # the last thing before the weights are read, as by `prune.remove`
        codes.append(code_of(lambda: accelerator.get_state_dict(model)))
        accelerator.clear()

        model, optimizer = prepared(accelerator)
        model.to("cpu")
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5  # before the first step
            parameter.data = parameter.data * 0.5
        codes.append(code_of(lambda: optimizer.step()))
        codes.append(code_of(lambda: model(x)))
        accelerator.clear()

        model, optimizer = prepared(accelerator)
        model.double().float()  # nothing is lost
        codes.append(code_of(lambda: model(x)))
        accelerator.clear()

        model, optimizer = prepared(accelerator)
        model.double()
        model.head.weight.data = torch.ones(4, 4, dtype=torch.float64)
        codes.append(code_of(lambda: model(x.double())))
        accelerator.clear()

        accelerator = Accelerator(cpu=True, plan=PLAN, mixed_precision="bf16")
        model, optimizer = prepared(accelerator)
        accelerator.backward(model(x).sum())
        model.head.weight.data.clamp_(-0.1, 0.1)  # the shards are there again
        optimizer.step()
        loss = model(x).sum()
        model.head.weight.data.clamp_(-0.1, 0.1)  # a copy in bf16
        codes.append(code_of(lambda: accelerator.backward(loss)))
        return codes

    expected = [
        "shard-changed",
        "shard-changed",
        "shard-evaluation",
        "shard-changed",
        "data-assigned",
        "data-assigned",
        "data-assigned",
        "data-assigned",
        "none",
        "data-assigned",
        "shard-written",
    ]
    assert run_ranks(work, 2) == [expected] * 2


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


TOOLS = (
    lambda layer: prune.identity(layer, "weight"),
    lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    lambda layer: prune.ln_structured(layer, "weight", 0.5, n=2, dim=0),
    lambda layer: prune.random_structured(layer, "weight", 0.5, dim=0),
    lambda layer: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=3),
    lambda layer: prune.custom_from_mask(layer, "weight", torch.ones(4, 4)),
    nn.utils.spectral_norm,
    nn.utils.weight_norm,
    nn.utils.parametrizations.spectral_norm,
    nn.utils.parametrizations.weight_norm,
    nn.utils.parametrizations.orthogonal,
    lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Twice()),
)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("plan", [PLAN, {"tp": 2}])
def test_torchs_tools_refuse_divided_parameters(plan):
    def work():
        options = {"tensor": {"plan": {"body": "colwise_gather"}}} if "tp" in plan else {}
        accelerator = Accelerator(cpu=True, plan=plan, options=options)
        model, _ = prepared(accelerator)
        codes = {code_of(partial(tool, model.body)) for tool in TOOLS}
        loss = model(torch.ones(2, 4)).sum()
        # Now `shard` has whole parameters in the model.
        codes |= {code_of(partial(tool, model.body)) for tool in TOOLS}
        accelerator.backward(loss)
        names = list(accelerator.get_state_dict(model))
        accelerator.clear()
        # Layers of before `prepare`, and those of a model that is not divided.
        model = Net()
        nn.utils.parametrizations.weight_norm(model.head)
        prune.l1_unstructured(model.head.parametrizations.weight, "original0", 0.5)
        accelerator.prepare(model)(torch.ones(2, 4))
        for tool in TOOLS:
            tool(nn.Linear(4, 4))
        return codes, names

    assert run_ranks(work, 2) == [({"shard-changed"}, list(Net().state_dict()))] * 2


def converted(accelerator, steps_before: int):
    """Trains in float32, `steps_before` steps, and then in float64."""
    torch.manual_seed(0)
    model = Net().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(steps_before + 2):
        if step == steps_before:
            model.double()
        accelerator.backward(model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("plan", [{"replicate": 2}, {"shard": 2, "zero": 1}, {"shard": 2, "zero": 2}, PLAN, {"tp": 2}])
def test_a_converted_model_trains_on_or_is_refused(plan):
    def work(plan):
        options = {"tensor": {"plan": {"body": "colwise_gather"}}} if plan and "tp" in plan else {}
        accelerator = Accelerator(cpu=True, plan=plan, options=options)
        states = [converted(accelerator, 0)]
        codes = [code_of(lambda: states.append(converted(accelerator, 2)))]
        model, _ = prepared(accelerator)
        model.body.double()
        codes.append(code_of(lambda: model(torch.ones(2, 4))) if plan == PLAN else "")
        return states, codes

    ((expected, _),) = run_ranks(work, 1, args=(None,))
    codes = ["shard-changed"] * 2 if plan == PLAN else ["none", ""]
    for states, seen in run_ranks(work, 2, args=(plan,)):
        assert seen == codes
        for state, want in zip(states, expected, strict=plan != PLAN):
            torch.testing.assert_close(state, want)


def test_a_tensor_in_the_place_of_a_whole_parameter_is_refused():
    def work():
        accelerator = Accelerator(cpu=True, plan=PLAN)
        model, _ = prepared(accelerator)
        loss = model(torch.ones(2, 4)).sum()
        del model.head.weight
        model.head.weight = torch.zeros(4, 4)
        accelerator.backward(loss)  # FSDP2 puts its shard into the module again
        return code_of(lambda: model(torch.ones(2, 4)))

    assert run_ranks(work, 2) == ["shard-changed"] * 2


ELSEWHERE = {
    "a barrier": lambda accelerator, model, loader: accelerator.wait_for_everyone(),
    "the next epoch": lambda accelerator, model, loader: next(iter(loader)),
    "training": lambda accelerator, model, loader: model(torch.ones(2, 4)),
}


@pytest.mark.parametrize("others", ELSEWHERE)
def test_rank_0_that_evaluates_alone_is_refused_whatever_the_others_do(others):
    def work():
        accelerator = Accelerator(cpu=True, plan=PLAN)
        model, optimizer = prepared(accelerator)
        loader = accelerator.prepare(DataLoader(torch.ones(8, 4), batch_size=2, shuffle=True))
        # An evaluation by all ranks, and steps after it: each evaluation is checked at its beginning.
        for _ in range(2):
            with torch.no_grad():
                model(torch.ones(2, 4))
            train(accelerator, model, optimizer)

        def step():
            if accelerator.is_main_process:
                with torch.no_grad():
                    model(torch.ones(2, 4))
            else:
                ELSEWHERE[others](accelerator, model, loader)

        return code_of(step)

    of_others = "shard-evaluation" if others == "training" else "collective-mismatch"
    assert run_ranks(work, 2, timeout_s=60) == ["shard-evaluation", of_others]


def of_sample(model):
    sample = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(sample).sum(), sample)


def of_sample_in_eval(model):
    model.eval()
    of_sample(model)


USES = {
    "gradients of a sample": of_sample,
    "gradients of a sample, in eval": of_sample_in_eval,
    "a training pass": lambda model: model(torch.ones(2, 4)).sum().backward(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("world", "plan"), [(2, PLAN), (2, {"offload": "all=disk"}), (4, {"replicate": 2, "shard": 2})]
)
def test_rank_0_that_uses_a_divided_model_alone_is_refused_with_gradients_too(world, plan, use, tmp_path):
    def work(plan):
        options = {"offload": {"always": True}} if "offload" in plan else {}
        accelerator = Accelerator(cpu=True, plan=plan, options=options)
        model, optimizer = prepared(accelerator)
        codes = []
        for _ in range(2):  # after a refusal, the ranks can go on together
            model.train()
            train(accelerator, model, optimizer)
            if accelerator.is_main_process:
                codes.append(code_of(lambda: USES[use](model)))
            else:
                codes.append(code_of(lambda: accelerator.reduce(torch.ones(()))))
        return codes

    if "offload" in plan:
        plan = {"offload": f"all=disk:{tmp_path}"}
    codes = run_ranks(work, world, args=(plan,), timeout_s=60)
    assert codes == [["shard-diverged"] * 2] + [["collective-mismatch"] * 2] * (world - 1)


def test_a_backward_pass_of_rank_0_alone_is_refused():
    def work():
        accelerator = Accelerator(cpu=True, plan=PLAN)
        model, optimizer = prepared(accelerator)
        train(accelerator, model, optimizer)
        loss = model(torch.ones(2, 4)).sum()
        if accelerator.is_main_process:
            return code_of(loss.backward)
        return code_of(accelerator.wait_for_everyone)

    assert run_ranks(work, 2, timeout_s=60) == ["shard-diverged", "collective-mismatch"]


EXTREMES = (
    lambda gradient: gradient.abs().max(),
    lambda gradient: gradient.min(),
    lambda gradient: gradient.amax(0),
    lambda gradient: gradient.argmax(),
    lambda gradient: gradient.median(),
    lambda gradient: torch.aminmax(gradient).max,
    lambda gradient: gradient.norm(float("inf")),
    lambda gradient: torch._foreach_norm([gradient], float("inf"))[0],
)


def test_the_largest_element_is_found_where_some_rank_has_none():
    def work():
        accelerator = Accelerator(cpu=True, plan={"shard": 3})
        torch.manual_seed(0)
        model = accelerator.prepare(nn.Linear(4, 2))  # no row of it is on the last rank
        accelerator.backward(model(torch.arange(8.0).reshape(2, 4)).square().sum())
        whole = model.weight.grad.full_tensor()
        answers = []
        for extreme in EXTREMES:
            answer = extreme(model.weight.grad)
            answers.append(torch.equal(answer.full_tensor(), extreme(whole)))
        return answers

    assert run_ranks(work, 3, timeout_s=60) == [[True] * len(EXTREMES)] * 3


def test_a_frozen_model_gives_up_whole_parameters_after_a_pass_with_gradients_on():
    def work():
        accelerator = Accelerator(cpu=True, plan=PLAN)
        teacher, student = Net().requires_grad_(False), Net()
        teacher, student = accelerator.prepare(teacher, student)
        teacher(torch.ones(2, 4))
        return all(hasattr(parameter, "full_tensor") for parameter in teacher.parameters())

    assert run_ranks(work, 2) == [True, True]
