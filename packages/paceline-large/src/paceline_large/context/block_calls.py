"""The forward of a block with replaced attention, and the arguments of one call of a block.

The region is a keyword argument of the call. So recomputation, which is between the hooks and this forward and calls the
forward again later, passes the same region on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from paceline.base.errors import TrainError
from paceline.parallel.key_value_caches import CACHES
from paceline.world.forward import original_forward, override_forward
from paceline.world.tree import map_tensors, tensors
from paceline_large.context.attention_calls import AttentionCalls
from paceline_large.context.sequence_split import SequenceRegion

REGION = "paceline_region"
_NAME = "context"


def divide_attention(block: nn.Module) -> None:
    """Makes `block.forward` compute attention over the region that is passed with the call."""

    def forward(
        block: nn.Module,
        original: Callable[..., Any],
        *args: object,
        paceline_region: SequenceRegion | None,
        **kwargs: object,
    ) -> object:
        if paceline_region is None:
            return original(*args, **kwargs)
        with AttentionCalls(paceline_region):
            return original(*args, **kwargs)

    override_forward(block, _NAME, forward)


@dataclass(frozen=True)
class BlockCall:
    """One call of a block.

    Attributes:
        block: with `divide_attention`.
        args, kwargs: of the call.
    """

    block: nn.Module
    args: tuple[object, ...]
    kwargs: Mapping[str, object]

    @cached_property
    def own_forward(self) -> Callable[..., Any]:
        """The forward of the block with ordinary attention."""
        original = original_forward(self.block, _NAME)
        assert original is not None, "divide_attention was not called"
        return original

    @cached_property
    def _parameters(self) -> list[str]:
        return list(inspect.signature(self.own_forward).parameters)

    @cached_property
    def _named(self) -> list[tuple[str, object]]:
        """Each argument with the name of its parameter; arguments of `*args` have the name of that parameter."""
        names = self._parameters + self._parameters[-1:] * len(self.args)
        return [*zip(names, self.args, strict=False), *self.kwargs.items()]

    @cached_property
    def _hidden(self) -> tuple[str, Tensor] | None:
        """The hidden states with the name of their parameter: the first parameter of the signature that gets a tensor."""
        # The order of the signature decides, and not that of the call: keyword arguments may come in any order.
        places = {name: place for place, name in enumerate(self._parameters)}
        first_tensors: list[tuple[str, Tensor]] = []
        for name, value in self._named:
            inside = tensors(value)
            if inside:
                first_tensors.append((name, inside[0]))
        return min(first_tensors, key=lambda pair: places.get(pair[0], len(places)), default=None)

    def hidden_states(self) -> Tensor:
        """Returns the hidden states among the arguments.

        Raises:
            TrainError: `context-blocks`.
        """
        if self._hidden is None:
            raise TrainError(
                "context-blocks",
                f"{type(self.block).__name__} is given no tensor whose sequence could be divided.",
                why="hidden states are the first tensor among a block's arguments",
                fix="name the blocks of the transformer with options={'context': {'blocks': 'layers.*'}}",
            )
        return self._hidden[1]

    def map(self, change: Callable[[Tensor, str, bool], Tensor]) -> BlockCall:
        """Returns the call with `change(tensor, name of the parameter, whether it is the hidden states)` for each tensor."""
        hidden_name, hidden = self._hidden or ("", None)

        def changed(name: str, value: object) -> object:
            # The name is compared too: a call may pass the same tensor in another argument.
            return map_tensors(lambda tensor: change(tensor, name, name == hidden_name and tensor is hidden), value)

        return self._with([changed(name, value) for name, value in self._named])

    @property
    def has_cache(self) -> bool:
        """Whether the block gets a cache of keys and values."""
        return any(name in CACHES and value is not None for name, value in self._named)

    def without_caches(self) -> BlockCall:
        """Returns the call with None for each cache of keys and values."""
        values: list[object] = []
        for name, value in self._named:
            values.append(None if name in CACHES else value)
        return self._with(values)

    def _with(self, values: list[object]) -> BlockCall:
        """Returns the call with other values: first those of `args`, then those of `kwargs`."""
        count = len(self.args)
        kwargs = dict(zip(self.kwargs, values[count:], strict=True))
        return replace(self, args=tuple(values[:count]), kwargs=kwargs)
