"""What we rely on of the private side of optimizers and learning-rate schedulers."""

import warnings

import torch
from torch import nn

from paceline.torch_internals import optimizers


def test_two_hooks_lie_between_the_kernels_and_all_other_hooks_for_one_step() -> None:
    calls = []
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizers.step_inside_of_hooks(
        optimizer, optimizer.step, lambda *_: calls.append("begin"), lambda *_: calls.append("end")
    )
    optimizer.step()
    assert calls == ["before", "begin", "end", "after", "before", "after"]


def test_a_step_without_hooks_is_a_step() -> None:
    calls = []
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    layer.weight.grad = torch.ones(2, 2)
    before = layer.weight.detach().clone()
    optimizers.step_without_hooks(optimizer)
    assert torch.equal(layer.weight, before - 1) and not calls


def test_a_scheduler_does_not_warn_after_an_optimizer_that_is_marked() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizers.mark_as_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


class Wrapper(torch.optim.Optimizer):
    """Like many a Lookahead, it does not call `Optimizer.__init__`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: object = None) -> None:
        pass


def test_a_wrapper_gets_the_tables_of_hooks() -> None:
    wrapper = Wrapper(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    optimizers.complete_hooks(wrapper)
    calls: list[str] = []
    wrapper.register_step_pre_hook(lambda *_: calls.append("before"))
    wrapper.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    wrapper.step()
    wrapper.state_dict()
    assert calls == ["before", "saved"]


def test_the_model_of_an_update_of_batch_norms_is_known_inside_of_it_alone() -> None:
    models = []

    def batches():
        models.append(optimizers.model_of_update())
        yield torch.ones(2, 3)

    average = torch.optim.swa_utils.AveragedModel(nn.BatchNorm1d(3))
    torch.optim.swa_utils.update_bn((batch for batch in batches()), average)
    assert models == [average] and optimizers.model_of_update() is None
