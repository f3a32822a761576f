"""A block's forward with its attention replaced, and one call of it: its arguments one by one.

The region arrives in the call's keywords: whoever stands between the hooks and this forward, and calls it again later
(recompute), hands on the same one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from paceline.base.errors import TrainError
from paceline.parallel.context.attention_calls import AttentionCalls
from paceline.parallel.context.sequence_split import Region
from paceline.world.forward import original_forward, override_forward
from paceline.world.tree import map_tensors, tensors

REGION = "paceline_region"
CACHES = ("past_key_value", "past_key_values", "layer_past")  # transformers' names for kept keys and values
_NAME = "context"


def divide_attention(block: nn.Module) -> None:
    """Makes `block.forward` compute with the attention of the region that comes with the call."""

    def forward(
        block: nn.Module,
        original: Callable[..., Any],
        *args: object,
        paceline_region: Region | None,
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
        """The block's forward with ordinary attention."""
        original = original_forward(self.block, _NAME)
        assert original is not None, "divide_attention was not called"
        return original

    @cached_property
    def _parameters(self) -> list[str]:
        return list(inspect.signature(self.own_forward).parameters)

    @cached_property
    def _named(self) -> list[tuple[str, object]]:
        """Each argument after the name of its parameter; what `*args` takes has the name of that."""
        names = self._parameters + self._parameters[-1:] * len(self.args)
        return [*zip(names, self.args, strict=False), *self.kwargs.items()]

    @cached_property
    def _hidden(self) -> tuple[str, Tensor] | None:
        """Hidden states and their parameter: the first one of the signature that is given a tensor."""
        places = {name: place for place, name in enumerate(self._parameters)}
        with_tensors = [(name, tensors(value)) for name, value in self._named if tensors(value)]
        if not with_tensors:
            return None
        name, candidates = min(with_tensors, key=lambda pair: places.get(pair[0], len(places)))
        return name, candidates[0]

    def hidden_states(self) -> Tensor:
        """The hidden states among the arguments.

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
        """The call with `change(tensor, parameter, whether it is hidden states)` for each tensor."""
        hidden_name, hidden = self._hidden or ("", None)

        def changed(name: str, value: object) -> object:
            return map_tensors(lambda tensor: change(tensor, name, name == hidden_name and tensor is hidden), value)

        return self._with([changed(name, value) for name, value in self._named])

    @property
    def has_cache(self) -> bool:
        """Whether the block is given a cache of keys and values."""
        return any(name in CACHES and value is not None for name, value in self._named)

    def without_caches(self) -> BlockCall:
        """The call with None for each cache of keys and values."""
        return self._with([None if name in CACHES else value for name, value in self._named])

    def _with(self, values: list[object]) -> BlockCall:
        """The call with other values: first those of `args`, then those of `kwargs`."""
        count = len(self.args)
        kwargs = dict(zip(self.kwargs, values[count:], strict=True))
        return replace(self, args=tuple(values[:count]), kwargs=kwargs)
