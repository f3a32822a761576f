"""Every optimizer and every learning-rate scheduler of torch's, each on one small model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils

from torch_sweep.runs import FEATURES, WORDS, Case


class Net(nn.Module):
    """Matrices, vectors, a number, an embedding that the loss reaches in some rows only, and a layer that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 6)
        self.first, self.last = nn.Linear(FEATURES + 6, 5), nn.Linear(5, 1)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        h = torch.cat([x, self.table(words).mean(1)], 1)
        h = self.norm(self.first(h)).tanh()
        return self.last(self.frozen(h)).squeeze(1) * self.scale


class Matrices(nn.Module):
    """Matrices alone: Muon takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 5, bias=False), nn.Tanh(), nn.Linear(5, 1, bias=False))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return self.layers(x).squeeze(1)


class Sparse(nn.Module):
    """An embedding with sparse gradients, alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 3, sparse=True)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return self.table(words).sum((1, 2)) * x[:, 0]


DIVIDED: dict[Callable[[], nn.Module], dict[str, str]] = {
    Net: {"*first": "rowwise_split", "*table": "vocabulary"},
    Matrices: {"layers.0": "rowwise_split"},
    Sparse: {"*": "replicated"},
}


def one(kind: str, model: Callable[[], nn.Module] = Net, closure: bool = False, **options: Any) -> Case:
    options = {"lr": 0.02, **options}

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return getattr(torch.optim, kind)(trained, **options)

    shown = [f"{key}={value}" for key, value in options.items() if key != "lr"] + ["closure"] * closure
    return Case(f"{kind}({', '.join(shown)})", model, optimizer, closure=closure, divided=DIVIDED[model])


COMMON = {
    "SGD": [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.5},
        {"fused": True},
    ],
    "Adam": [
        {"amsgrad": True, "weight_decay": 0.1},
        {"fused": True},
        {"lr": torch.tensor(0.02), "eps": 1e-7},
        {"decoupled_weight_decay": True},
    ],
    "AdamW": [{"amsgrad": True}, {"fused": True}, {"betas": (0.5, 0.9)}],
    "Adagrad": [{"lr_decay": 0.1}, {"fused": True}, {"initial_accumulator_value": 0.5}],
    "Adadelta": [{"lr": 1.0, "weight_decay": 0.1}],
    "Adamax": [{"weight_decay": 0.1}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "ASGD": [{"t0": 2, "weight_decay": 0.1}],
    "RMSprop": [{"centered": True, "momentum": 0.5}],
    "Rprop": [{}],
}
CAPTURABLE = {"Adam", "AdamW", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "RMSprop", "Rprop"}


def optimizers() -> list[Case]:
    cases = []
    for kind, variants in COMMON.items():
        cases += [one(kind), one(kind, foreach=True), one(kind, foreach=False), one(kind, maximize=True, lr=1e-4)]
        cases += [one(kind, differentiable=True), one(kind, closure=True)]
        if kind in CAPTURABLE:
            cases.append(one(kind, capturable=True))
        cases += [one(kind, **options) for options in variants if options]
    cases += [
        one("Adafactor"),
        one("Adafactor", foreach=True, weight_decay=0.1),
        one("Adafactor", maximize=True, lr=1e-4),
        one("Muon", Matrices),
        one("Muon", Matrices, nesterov=False, weight_decay=0.2),
        one("LBFGS", closure=True, lr=0.1, max_iter=3),
        one("LBFGS", closure=True, lr=1.0, max_iter=4, line_search_fn="strong_wolfe"),
        one("SparseAdam", Sparse),
    ]
    return cases


OPTIMIZERS = optimizers()


def scheduled(name: str, build: Callable[[torch.optim.Optimizer], Any], momentum: float = 0.9) -> Case:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for parameter in parameters if parameter.requires_grad], 0.1, momentum)

    return Case(name, Net, optimizer, scheduler=build, divided=DIVIDED[Net])


SCHEDULERS = [
    scheduled("LambdaLR", lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step))),
    scheduled("MultiplicativeLR", lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9)),
    scheduled("StepLR", lambda o: schedulers.StepLR(o, 2, 0.5)),
    scheduled("MultiStepLR", lambda o: schedulers.MultiStepLR(o, [1, 3])),
    scheduled("ConstantLR", lambda o: schedulers.ConstantLR(o, 0.5, 2)),
    scheduled("LinearLR", lambda o: schedulers.LinearLR(o, 0.2, total_iters=3)),
    scheduled("ExponentialLR", lambda o: schedulers.ExponentialLR(o, 0.8)),
    scheduled("PolynomialLR", lambda o: schedulers.PolynomialLR(o, 4, 2.0)),
    scheduled("CosineAnnealingLR", lambda o: schedulers.CosineAnnealingLR(o, 4)),
    scheduled("CosineAnnealingWarmRestarts", lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2)),
    scheduled("CyclicLR", lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 2)),
    scheduled("OneCycleLR", lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=6)),
    scheduled("ReduceLROnPlateau", lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=0.5)),
    scheduled(
        "SequentialLR",
        lambda o: schedulers.SequentialLR(o, [schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)], [2]),
    ),
    scheduled(
        "ChainedScheduler",
        lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o, 0.1, 2), schedulers.ExponentialLR(o, 0.9)]),
    ),
    scheduled("SWALR", lambda o: torch.optim.swa_utils.SWALR(o, 0.01, 2)),
]


class Normed(nn.Module):
    """A model with batch norm, whose statistics an average of weights has to compute anew."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 5), nn.Linear(5, 1)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor, words: Tensor | None = None) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh()).squeeze(1)


def averaged(
    name: str, build: Callable[[nn.Module], nn.Module], model: Callable[[], nn.Module], update: bool = False
) -> Case:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for parameter in parameters if parameter.requires_grad], 0.1)

    divided = {**DIVIDED[Net]} if model is Net else {"*first": "rowwise_split"}
    return Case(name, model, optimizer, average=build, updates_statistics=update, divided=divided)


def swa(model: nn.Module) -> nn.Module:
    return swa_utils.AveragedModel(model)


def swa_multi(model: nn.Module) -> nn.Module:
    return swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_swa_multi_avg_fn())


def swa_with_buffers(model: nn.Module) -> nn.Module:
    return swa_utils.AveragedModel(model, use_buffers=True)


def ema(model: nn.Module) -> nn.Module:
    return swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))


def ema_by_function(model: nn.Module) -> nn.Module:
    return swa_utils.AveragedModel(model, avg_fn=swa_utils.get_ema_avg_fn(0.9), use_buffers=True)


AVERAGES = [
    averaged("AveragedModel()", swa, Net),
    averaged("AveragedModel(), update_bn", swa, Normed, update=True),
    averaged("AveragedModel(use_buffers=True)", swa_with_buffers, Normed),
    averaged("AveragedModel(multi_avg_fn=get_ema_multi_avg_fn(0.9))", ema, Net),
    averaged("AveragedModel(avg_fn=get_ema_avg_fn(0.9), use_buffers=True)", ema_by_function, Normed),
    averaged("AveragedModel(multi_avg_fn=get_swa_multi_avg_fn())", swa_multi, Net),
]
