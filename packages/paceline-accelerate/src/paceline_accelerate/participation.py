"""`ParticipantByState`: what an accelerator shows of its process, which accelerate reads from the accelerator's state.

accelerator.num_processes        state.num_processes, which tests of scripts set or replace
@accelerator.on_main_process     decorates a function
@Accelerator.on_main_process     decorates a method in the body of a subclass, before any accelerator exists
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from paceline.world.participant import Participant
from paceline_accelerate.errors import CompatValueError
from paceline_accelerate.split import split_part
from paceline_accelerate.state import PartialState


class ParticipantByState(Participant):
    """A participant that follows accelerate's state, and stays as it was if that was reset."""

    def _shown(self, name: str, own: Any) -> Any:
        """Returns an attribute of the state; `own` until there is one, and after a reset."""
        state = self.__dict__.get("state")
        return own if state is None else vars(state).get(name, own)

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return int(self._shown("num_processes", self.world.size))

    @property
    def process_index(self) -> int:
        """Number of this process among all."""
        return int(self._shown("process_index", self.world.rank))

    @property
    def local_process_index(self) -> int:
        """Number of this process on its host."""
        return int(self._shown("local_process_index", self.world.local_rank))

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorates a function so that only rank 0 runs it."""
        return _decorated("on_main_process", self, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorates a function so that the first process of each host runs it."""
        return _decorated("on_local_main_process", self, function)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorates a function so that only the last rank runs it."""
        return _decorated("on_last_process", self, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorates a function so that only rank `process_index` runs it; a single process always runs it."""
        if isinstance(self, Participant) and function is None:
            return lambda inner: self.on_process(inner, process_index)
        return _decorated("on_process", self, function, process_index=process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorates a function so that process `local_process_index` of each host runs it; a single process always does."""
        if isinstance(self, Participant) and function is None:
            return lambda inner: self.on_local_process(inner, local_process_index)
        return _decorated("on_local_process", self, function, local_process_index=local_process_index)

    @contextmanager
    def split_between_processes(self, inputs: object, apply_padding: bool = False) -> Iterator[Any]:
        """Gives each process its part; see `paceline_accelerate.split.split_part`."""
        yield split_part(inputs, self.process_index, self.num_processes, apply_padding)


def _decorated(name: str, participant: Any, function: Callable[..., Any] | None, **choice: int | None) -> Any:
    """Returns a function that asks the state at each call who runs it.

    Args:
        name: of the decorator.
        participant: the accelerator; in the body of a subclass of `Accelerator` the method that is decorated.
        function: the function; None in the body of a subclass.
        choice: the rank that the decorator names.

    Raises:
        CompatValueError: `compat-argument`, if there is no function.
    """
    if function is None:
        # In the body of a class there is no accelerator yet, and the method stands in its place.
        is_method = callable(participant) and "Accelerator." in getattr(participant, "__qualname__", "")
        if not is_method:
            raise CompatValueError(
                "compat-argument",
                f"`{name}` needs a function, and an accelerator to ask.",
                why="it was called on the class `Accelerator`, or without a function",
                fix=f"make an accelerator first, and decorate with `@accelerator.{name}`",
            )
        function = participant
    decorated = function

    @wraps(decorated)
    def run(*args: Any, **kwargs: Any) -> Any:
        return getattr(PartialState(), name)(decorated, **choice)(*args, **kwargs)

    return run
