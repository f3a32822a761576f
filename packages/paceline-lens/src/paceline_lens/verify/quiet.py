"""`Quiet`: while it is open, dropouts drop nothing. It also sees the losses of a script that calls `loss.backward()` itself.

Runs of different widths draw different masks for the same rows, so that no number could be compared. Each dropout reports
the state of the generator that it would have used, so that a run can still tell whether its ranks would draw the same
masks. Other random functions are not changed, and what they draw is reported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paceline_lens.verify.sketch import digest

# Functions written in Python, whose parameter `training` decides whether they draw.
_PYTHON: tuple[Callable[..., object], ...] = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    functional.rrelu,
    functional.multi_head_attention_forward,
)
_NATIVE = (torch.dropout, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, torch.rrelu)
_DRAWING: frozenset[Callable[..., object]] = frozenset(
    (
        torch.bernoulli, torch.multinomial, torch.normal, torch.poisson, torch.rand, torch.rand_like, torch.randint,
        torch.randint_like, torch.randn, torch.randn_like, torch.Tensor.bernoulli, torch.Tensor.bernoulli_,
        torch.Tensor.exponential_, torch.Tensor.multinomial, torch.Tensor.normal_, torch.Tensor.random_,
        torch.Tensor.uniform_, functional.gumbel_softmax,
    )
)  # fmt: skip

_READING = (torch.Tensor.item, torch.Tensor.__float__)


class Quiet(TorchFunctionMode):
    """Turns dropout off, and reports the state of the generator where it would have drawn.

    Args:
        drops_nothing: whether dropout is turned off; if not, functions are only looked at.

    Attributes:
        tell: called with a digest of torch's generator for each dropout in training.
        tell_draw: called with what another function has drawn.
        tell_loss: called with each tensor whose `backward` is called, before it runs.
        tell_read: called with each tensor of which Python reads a number, and the frame that reads it.
    """

    def __init__(self, drops_nothing: bool = True) -> None:
        super().__init__()
        self._drops_nothing = drops_nothing
        self.stream = ""
        self.tell_loss: Callable[[torch.Tensor], object] = lambda loss: None
        self.tell_read: Callable[[torch.Tensor, FrameType], object] | None = None
        self.tell: Callable[[str], object] = lambda stream: None
        self.tell_draw: Callable[[torch.Tensor], object] = lambda drawn: None

    def listen(
        self, *, loss: Callable[[torch.Tensor], object], read: Callable[[torch.Tensor, FrameType], object] | None = None
    ) -> None:
        """Has losses and reads of tensors reported; see `tell_loss` and `tell_read`."""
        self.tell_loss = loss
        self.tell_read = read

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is torch.Tensor.backward:
            self.tell_loss(args[0])
        if self.tell_read is not None and func in _READING:
            self.tell_read(args[0], sys._getframe(1))
        if not self._drops_nothing:
            return func(*args, **keywords)
        if func in _PYTHON_SIGNATURES:
            bound = _PYTHON_SIGNATURES[func].bind(*args, **keywords)
            if bound.arguments.get("training", _default(func)):
                self._note()
                bound.arguments["training"] = False
            return func(*bound.args, **bound.kwargs)
        if func in _NATIVE:
            place = 4 if func is torch.rrelu else 2
            if len(args) > place and args[place]:
                self._note()
                args = (*args[:place], False, *args[place + 1 :])
            elif keywords.get("train") or keywords.get("training"):
                self._note()
                keywords["train" if "train" in keywords else "training"] = False
        elif func is functional.scaled_dot_product_attention:
            if keywords.get("dropout_p"):
                self._note()
                keywords["dropout_p"] = 0.0
            elif len(args) > 4 and args[4]:
                self._note()
                args = (*args[:4], 0.0, *args[5:])
        result = func(*args, **keywords)
        if func in _DRAWING and isinstance(result, torch.Tensor):
            self.tell_draw(result)
        return result

    def _note(self) -> None:
        self.tell(digest(torch.get_rng_state().numpy().tobytes()))


_PYTHON_SIGNATURES = {function: inspect.signature(function) for function in _PYTHON}


def nudge_weights(weights: Iterable[torch.Tensor], by: float) -> None:
    """Changes each weight by a part of itself, up or down, as the two runs do that show how fast rounding grows."""
    # The same signs in every run, on the CPU: generators of devices give other numbers.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in weights:
            signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
            weight.mul_(1 + by * signs.to(weight))


def _default(function: Callable[..., object]) -> object:
    return _PYTHON_SIGNATURES[function].parameters["training"].default
