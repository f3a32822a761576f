"""Hooks of a script on modules and parameters: the numbers of one process under every plan, or a warning that they are not."""

from __future__ import annotations

import logging

import pytest
import torch
from parity_models import Attention, Mixture
from shared_ranks import run_ranks
from torch import nn
from torch.nn import functional as F

from paceline import Accelerator
from paceline.base.log import forget_warnings


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention, self.mlp = Attention(16, 4), Mlp()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 24)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def centred(x):
    return x - 0.5 * x.mean(-1, keepdim=True)


def mixed(x):
    """Over the positions."""
    return x - 0.5 * x.mean(-2, keepdim=True)


def shrink(parameter: nn.Parameter) -> None:
    parameter.grad.div_(1 + 10 * parameter.grad.norm())


def register(module: nn.Module, how: str, kept: list[torch.Tensor]) -> None:
    if how == "penalty on outputs":
        module.register_forward_hook(lambda *given: kept.append(given[-1].pow(2).mean()))
    elif how == "penalty on inputs":
        module.register_forward_pre_hook(lambda *given: kept.append(given[-1][0].pow(2).mean()))
    elif how == "mixes positions":
        module.register_forward_hook(lambda *given: mixed(given[-1]))
    elif how == "gradients of inputs":
        module.register_full_backward_hook(lambda *given: tuple(map(centred, given[1])))
    elif how == "gradients of outputs":
        module.register_full_backward_pre_hook(lambda *given: tuple(map(centred, given[-1])))
    else:
        for parameter in module.parameters():
            if how == "gradients of parameters":
                parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            else:
                parameter.register_post_accumulate_grad_hook(shrink)


HOOKS = (
    "penalty on outputs",
    "penalty on inputs",
    "mixes positions",
    "gradients of inputs",
    "gradients of outputs",
    "gradients of parameters",
    "accumulated gradients",
)
BLOCK, NORM, UP, DOWN = "blocks.0", "blocks.0.norm1", "blocks.0.mlp.up_proj", "blocks.0.mlp.down_proj"


def trained(accelerator: Accelerator | None, make: type[nn.Module], name: str, how: str) -> torch.Tensor:
    torch.manual_seed(7)
    model = make().double()
    tokens = torch.randint(0, 24, (8, 9))
    kept: list[torch.Tensor] = []

    def loss_of(output, target):
        loss = F.cross_entropy(output.flatten(0, -2), target.flatten())
        while kept:
            loss = loss + 0.1 * kept.pop()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(tokens, 8)
    if accelerator is not None:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    register(model.get_submodule(name), how, kept)
    for batch in loader:
        pair = batch[:, :-1], batch[:, 1:]
        if accelerator is None:
            loss_of(model(pair[0]), pair[1]).backward()
        else:
            accelerator.forward_backward(model, pair, loss_of)
        optimizer.step()
    state = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    return torch.cat([value.flatten() for value in state.values()])


def alike(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and bool(((got - want).abs() <= (1e-9 * want.abs()).clamp(min=1e-12)).all())


def wrong_and_told(
    plan: dict[str, int], options: dict[str, dict[str, object]], make: type[nn.Module], modules: tuple[str, ...]
) -> tuple[set[str], set[str]]:
    """Returns the hooks with which the weights are not those of one process, and those of which this rank has warned."""
    said: list[str] = []
    logger = logging.getLogger("paceline.parallel")
    logger.handlers = [handler := logging.Handler(logging.WARNING)]
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    wrong: set[str] = set()
    told: set[str] = set()
    for name in modules:
        for how in HOOKS:
            # A stage of a pipeline has stubs of the modules of others; `cp` tries blocks, and refuses one that mixes positions.
            if ("pp" in plan and name != "blocks.0") or (
                "cp" in plan and how == "mixes positions" and name != "blocks.0"
            ):
                continue
            forget_warnings()
            said.clear()
            accelerator = Accelerator(cpu=True, split_batches=True, plan=plan, options=options)
            numbers = trained(accelerator, make, name, how)
            if not alike(numbers, trained(None, make, name, how)):
                wrong.add(f"{name}: {how}")
            if any("hook of" in text for text in said):
                told.add(f"{name}: {how}")
            accelerator.free_memory()
    return wrong, told


def listed() -> nn.Module:
    return Mixture(listed=True)


@pytest.mark.parametrize(
    ("plan", "options", "modules"),
    [
        ({"shard": 2}, {"shard": {"ignored": [NORM]}}, (NORM, UP)),
        ({"tp": 2}, {}, (NORM, UP, DOWN)),
        ({"tp": 2}, {"tensor": {"sequence": True}}, (BLOCK, NORM, DOWN)),
        ({"cp": 2}, {}, (BLOCK,)),
        ({"pp": 2}, {}, (BLOCK,)),
    ],
    ids=str,
)
def test_hooks_see_what_one_process_sees_or_it_is_told(plan, options, modules) -> None:
    (wrong, told), _ = run_ranks(wrong_and_told, 2, args=(plan, options, Decoder, modules), timeout_s=120)
    assert wrong <= told
    # Hooks on parameters get the mean of whole tensors everywhere; where only samples are divided, all hooks are right.
    assert not any("parameters" in hook or "accumulated" in hook for hook in wrong | told)
    assert bool(told) == ("shard" not in plan)


def test_hooks_on_experts_are_told_of() -> None:
    modules = (f"{BLOCK}.moe.experts.0.0",)
    (wrong, told), _ = run_ranks(wrong_and_told, 2, args=({"ep": 2}, {}, listed, modules), timeout_s=120)
    assert wrong <= told and told
