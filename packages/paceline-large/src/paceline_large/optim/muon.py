"""`Muon`: matrices are stepped along orthogonal directions, and all other parameters by AdamW, in one optimizer.

    matrices    momentum (Nesterov) -> Newton-Schulz iteration, which makes all singular values about 1 -> step
    the rest    embeddings, heads, biases, norms: torch's AdamW

A plan that divides states lets each matrix be stepped whole by one rank, so that it is orthogonalised once; the rest is divided
by rows (`parallel.data.division`).

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adam import adam as adam_step

from paceline.base.errors import PrepareError, Problem

# Names of matrices that AdamW steps, beside those of `nn.Embedding`: their rows belong to words or classes.
ADAM_NAMES = ("*embed*", "*lm_head*", "head.*", "output.*", "classifier.*", "score.*")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
_EPS = 1e-7


class Muon(Optimizer):
    """Steps the matrices of a model by Muon, and its other parameters by AdamW.

    Args:
        model: before or after `prepare`.
        muon_lr: learning rate of matrices, times sqrt(max(1, rows / columns)) of each.
        adam_lr: learning rate of the rest.
        momentum: of Muon, in Nesterov's form.
        weight_decay: decoupled, times the learning rate of the group.
        betas, eps: of AdamW.
        adam: patterns of names of parameters that AdamW steps whatever their shape. The weights of `nn.Embedding` are too.
        muon: patterns of names that Muon steps although `adam` or their module says otherwise.

    Shape:
        A matrix has 2 dimensions. Of 3 dimensions the first counts matrices, such as experts; of 4 (filters of a convolution)
        the last three are one.

    Raises:
        PrepareError: `muon-names`, for a pattern that matches no parameter, or one of `muon` that matches a vector.
    """

    iterates_in: ClassVar[str] = "bfloat16"  # see `paceline.optim.rounding`

    def __init__(
        self,
        model: nn.Module,
        muon_lr: float = 0.02,
        adam_lr: float = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adam: Sequence[str] = ADAM_NAMES,
        muon: Sequence[str] = (),
    ) -> None:
        matrices, others = _divided(model, adam, muon)
        groups: list[dict[str, Any]] = []
        if matrices:
            groups.append({"params": matrices, "elementwise": False, "lr": muon_lr, "momentum": momentum})
        if others:
            groups.append({"params": others, "elementwise": True, "lr": adam_lr, "betas": tuple(betas), "eps": eps})
        super().__init__(groups, {"weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["elementwise"]:
                self.step_by_adam(parameters, [parameter.grad for parameter in parameters], group)
                continue
            for parameter in parameters:
                step_along(parameter, self.direction(parameter, group), group)
        return loss

    def direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Returns the direction in which a matrix is stepped, after it has counted the gradient in its momentum."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"]
        momentum.lerp_(parameter.grad, 1 - group["momentum"])
        # Nesterov's form looks one step ahead.
        ahead = torch.lerp(parameter.grad, momentum, group["momentum"])
        return self.orthogonal(ahead, group)

    def orthogonal(self, matrix: Tensor, group: dict[str, Any]) -> Tensor:
        """Returns a nearly orthogonal matrix with the singular vectors of `matrix`, scaled by its shape."""
        if matrix.dim() == 3:
            return torch.stack([self.orthogonal(one, group) for one in matrix])
        flat = matrix.flatten(1)
        return newton_schulz(flat.bfloat16()).to(matrix.dtype).mul(shape_scale(flat)).reshape(matrix.shape)

    def step_by_adam(
        self, parameters: Sequence[Tensor], gradients: list[Tensor], group: dict[str, Any], decoupled: bool = True
    ) -> None:
        """Steps parameters by torch's Adam, with the kernels that torch chooses for their device.

        Args:
            parameters: some of the group's.
            gradients: one for each.
            group: has the rate and its like.
            decoupled: whether weight decay is: AdamW.
        """
        states: list[dict[str, Tensor]] = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            states.append(state)
        first, second = group["betas"]
        adam_step(
            list(parameters),
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=decoupled,
        )


def step_along(parameter: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
    """Steps a matrix along an orthogonal direction; weight decay is decoupled."""
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.add_(direction, alpha=-group["lr"])


def shape_scale(matrix: Tensor) -> float:
    """Returns the factor that gives the steps of tall and wide matrices about the same size."""
    rows, columns = matrix.shape[-2:]
    return sqrt(max(1.0, rows / columns))


def newton_schulz(matrix: Tensor) -> Tensor:
    """Returns a matrix with the singular vectors of `matrix` and singular values of about 1, by products in its own dtype.

    Shape: [rows, columns].
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if is_tall else matrix
    # The largest singular value is at most the norm.
    wide = wide / wide.norm().clamp(min=_EPS)
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.mT
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, polynomial, wide, beta=a)
    return wide.mT if is_tall else wide


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Returns whether the name of a parameter matches a pattern, whatever its capital letters."""
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)


def _divided(
    model: nn.Module, adam: Sequence[str], muon: Sequence[str]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Returns the parameters that Muon steps, and the others."""
    # A head that is tied to an embedding has several names.
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    problems = _pattern_problems(names, adam, muon)
    if problems:
        raise PrepareError.of(problems)
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter, aliases in names.items():
        for_adam = parameter.dim() < 2 or parameter in embeddings or _any_matches(aliases, adam)
        if for_adam and not _any_matches(aliases, muon):
            others.append(parameter)
        else:
            matrices.append(parameter)
    return matrices, others


def _any_matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(matches(name, patterns) for name in names)


def _pattern_problems(names: dict[nn.Parameter, list[str]], adam: Sequence[str], muon: Sequence[str]) -> list[Problem]:
    problems: list[Problem] = []
    # The names that are known without being given need not be there.
    given_for_adam = () if adam is ADAM_NAMES else adam
    for patterns, fewest_dims in ((given_for_adam, 0), (muon, 2)):
        for pattern in patterns:
            matched = [parameter for parameter, aliases in names.items() if _any_matches(aliases, [pattern])]
            vectors = [names[parameter][0] for parameter in matched if parameter.dim() < fewest_dims]
            if matched and not vectors:
                continue
            why = "no parameter of the model has such a name"
            if vectors:
                why = f"{vectors[0]} has fewer than 2 dimensions, and Muon steps matrices"
            problems.append(
                Problem(
                    "muon-names",
                    f"Muon was told of {pattern!r}, which names no parameter that it can take.",
                    why=why,
                    fix="write names as in `model.named_parameters()`, with * for any part, such as "
                    "muon=['blocks.*.weight']",
                )
            )
    return problems
