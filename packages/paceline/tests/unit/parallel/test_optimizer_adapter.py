"""One object adapts an optimizer: the order of a step, methods that are replaced once, and an optimizer prepared twice."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from paceline.base.errors import TrainError
from paceline.parallel.optimizer_adapter import OptimizerAdapter


class Own(torch.optim.Optimizer):
    """An optimizer of a script's own, with a method beside `step`."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def look(self) -> str:
        return "look"

    def step(self, closure=None):
        loss = None if closure is None else closure()
        # Not that of torch's SGD, which calls the hooks a second time once any SGD was made in this process.
        seen.append("kernels")
        return loss


seen: list[str] = []


@contextmanager
def around(name: str):
    seen.append(f"<{name}")
    yield
    seen.append(f"{name}>")


def optimizer_of(kind=Own):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    seen.clear()
    return kind([parameter], lr=0.1)


def declare(adapter: OptimizerAdapter) -> None:
    adapter.after_step(lambda _: seen.append("after"))
    adapter.choose_kernels(lambda _: seen.append("choose"))
    adapter.swap(lambda _: around("inner"))
    adapter.swap(lambda _: around("outer"))
    adapter.refuse(lambda _: seen.append("refuse"))


def test_a_step_has_one_order_whatever_was_declared_first() -> None:
    optimizer = optimizer_of()
    optimizer.register_step_pre_hook(lambda *_: seen.append("user before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("user after"))
    adapter = OptimizerAdapter.of(optimizer)
    declare(adapter)
    optimizer.register_step_pre_hook(lambda *_: seen.append("user before"))

    def closure():
        seen.append("loss")
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert seen == [
        *("loss", "user before", "user before", "refuse", "<outer", "<inner", "choose", "kernels"),
        *("inner>", "outer>", "after", "user after"),
    ]


def test_each_method_is_replaced_once_also_if_the_optimizer_is_prepared_again() -> None:
    optimizer = optimizer_of()
    plain = type(optimizer)
    for _ in range(2):
        adapter = OptimizerAdapter.of(optimizer)
        declare(adapter)
        adapter.surround(around)
        adapter.forget(lambda _: seen.append("forget"))
        adapter.forget(lambda _: seen.append("forget too"))
    for name in ("step", "look"):
        assert vars(optimizer)[name].__wrapped__.__func__ is getattr(plain, name)
    # torch wraps the `zero_grad` of no class.
    assert vars(optimizer)["zero_grad"].__wrapped__.__func__ is torch.optim.Optimizer.zero_grad
    assert optimizer.look() == "look" and seen == ["<look", "look>"]
    seen.clear()
    optimizer.zero_grad()
    assert seen == ["forget", "forget too"]
    seen.clear()
    optimizer.step()
    assert seen.count("kernels") == seen.count("refuse") == seen.count("<outer") == 1
    assert seen[0] == "<step" and seen[-1] == "step>"


def test_a_scheduler_counts_the_steps_of_an_adapted_optimizer_and_a_prepared_one_is_found_behind_it(recwarn) -> None:
    optimizer = optimizer_of(torch.optim.SGD)
    adapter = OptimizerAdapter.of(optimizer)
    declare(adapter)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert not recwarn.list and OptimizerAdapter.of(optimizer) is adapter


class Twice(torch.optim.SGD):
    """Calls its closure twice."""

    def step(self, closure=None):
        closure()
        return closure()


class Perturbed(torch.optim.SGD):
    """Calls its closure once, where it has changed the parameters, as some forms of SAM do."""

    @torch.no_grad()
    def step(self, closure=None):
        self.param_groups[0]["params"][0].add_(1.0)
        with torch.enable_grad():
            return closure()


@pytest.mark.parametrize("kind", [Twice, Perturbed, torch.optim.LBFGS])
def test_a_closure_is_refused_where_it_would_compute_other_gradients(kind) -> None:
    optimizer = optimizer_of(kind)
    declare(OptimizerAdapter(optimizer))
    with pytest.raises(TrainError) as caught:
        optimizer.step(lambda: 0.0)
    assert caught.value.code == "step-closure"


def test_what_a_refused_step_has_swapped_is_given_back() -> None:
    optimizer = optimizer_of()
    adapter = OptimizerAdapter(optimizer)
    declare(adapter)

    def fail(_: torch.optim.Optimizer) -> None:
        raise ValueError("half way")

    adapter.choose_kernels(fail)

    @contextmanager
    def swapped():
        try:
            yield
        finally:
            seen.append("given back")

    adapter.swap(lambda _: swapped())
    with pytest.raises(ValueError, match="half way"):
        optimizer.step()
    assert seen[-1] == "given back" and not optimizer._optimizer_step_pre_hooks


def test_what_a_later_group_brings_is_declared_inside_of_what_was_declared_for_the_whole_optimizer() -> None:
    class Grows(Own):
        def add_param_group(self, param_group):
            super().add_param_group(param_group)

    kept, gathered = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizer = optimizer_of(Grows)
    adapter = OptimizerAdapter(optimizer)

    def bind(_) -> None:
        with adapter.binding():
            adapter.swap(lambda _: around("late"))

    adapter.swap(lambda _: around("outer"))
    adapter.surround(lambda name: around(name))
    adapter.follow_groups(lambda tensors: [kept if tensor is gathered else tensor for tensor in tensors], bind)
    optimizer.add_param_group({"params": gathered})
    assert optimizer.param_groups[1]["params"][0] is kept
    assert seen == ["<add_param_group", "add_param_group>"]
    optimizer.step()
    assert seen[3:8] == ["<outer", "<late", "kernels", "late>", "outer>"]


def test_a_later_group_may_name_its_parameters() -> None:
    weight, bias = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([("weight", weight)], lr=0.1)
    OptimizerAdapter(optimizer).follow_groups(list, lambda _: None)
    optimizer.add_param_group({"params": [("bias", bias)]})
    assert optimizer.param_groups[1]["param_names"] == ["bias"]
