"""`accelerate.logging`: a logger that knows about ranks, with accelerate's prefix and levels."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from paceline.base import env
from paceline_accelerate.errors import CompatRuntimeError, CompatValueError
from paceline_accelerate.state import PartialState


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls take two more arguments.

    `main_process_only=True`: rank 0 alone speaks. `in_order=True`: all ranks speak, one after the other; every rank must
    then make the call. Each message begins with its rank.
    """

    @staticmethod
    def _should_log(main_process_only: bool) -> bool:
        return not main_process_only or PartialState().is_main_process

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Logs as `logging.Logger.log` does.

        Ranks: with `in_order` all.

        Raises:
            CompatRuntimeError: `compat-argument`, where there is no state that knows the rank yet.
        """
        if not PartialState._shared_state:
            raise CompatRuntimeError(
                "compat-argument",
                "this logger does not know its rank yet.",
                why="neither an Accelerator nor a PartialState was made",
                fix="write `accelerator = Accelerator()` first, or use `paceline.get_logger`, which needs none",
            )
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)  # the caller's line, not this one; a script counts from here too
        if not in_order:
            if self._should_log(main_only):
                super().log(level, msg, *args, **kwargs)
            return
        state = PartialState()
        for turn in range(state.num_processes):
            if turn == state.process_index:
                super().log(level, msg, *args, **kwargs)
            state.wait_for_everyone()

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Adds the rank to a message."""
        return f"[RANK {PartialState().process_index}] {msg}", kwargs

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Logs a warning the first time that this logger is given it."""
        call = (args, tuple(sorted(kwargs.items())))
        if call in self._logged_once:
            return
        self._logged_once.add(call)
        self.warning(*args, **{"stacklevel": 3, **kwargs})

    @property
    def _logged_once(self) -> set[Any]:
        """Arguments of the calls of `warning_once` that were logged."""
        messages: set[Any] = self.__dict__.setdefault("_once", set())
        return messages


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Returns a logger that speaks on the main process, unless a call says otherwise.

    Args:
        name: usually `__name__`.
        log_level: level of this logger and of the root logger; None takes ACCELERATE_LOG_LEVEL.

    Raises:
        CompatValueError: `compat-argument`, for a level that logging does not know.
    """
    logger = logging.getLogger(name)
    level = log_level or env.snapshot().get("ACCELERATE_LOG_LEVEL")
    if level:
        if level.upper() not in logging.getLevelNamesMapping():
            raise CompatValueError(
                "compat-argument",
                f"there is no log level {level!r}.",
                why=f"known: {', '.join(logging.getLevelNamesMapping())}",
                fix='use one of these, such as "INFO"',
            )
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def __getattr__(name: str) -> MultiProcessAdapter:
    """Returns the logger of one of accelerate's modules, by the module's name, such as "accelerate.checkpointing"."""
    if not name.startswith("accelerate."):
        raise AttributeError(name)
    return get_logger(name)
