"""`get_logger`: a logger that knows about ranks. It never touches the root logger; handlers are the script's affair."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist

from paceline.base import env
from paceline.base.errors import ConfigError, WorldError
from paceline.config.keywords import checked_keywords
from paceline.world.world import World


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls take two more arguments.

    `main_process_only=True`: rank 0 alone speaks. `in_order=False`: all ranks speak, one after the other in rank
    order; every rank must then make the call, since they wait for each other.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Logs as `logging.Logger.log` does.

        Ranks: with `in_order` all must call, whatever their level; otherwise nothing communicates.

        Raises:
            WorldError: `log-order`, for `in_order` with several processes and no process group yet.
        """
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller's line, not this one
        rank, size, grouped = _here()
        if not in_order or size == 1:
            if rank == 0 or not (main_only or in_order):
                super().log(level, msg, *args, **kwargs)
            return
        if not grouped:
            raise WorldError(
                "log-order",
                "in_order=True needs a process group, and there is none yet.",
                why=f"{size} processes are running, and they can take turns only by waiting for each other",
                fix="make the Accelerator first, or log with main_process_only=False",
            )
        for turn in range(size):
            if turn == rank:
                super().log(level, msg, *args, **kwargs)
            dist.barrier()

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Leaves message and arguments as they are."""
        return msg, kwargs

    def warning_once(self, msg: str, *args: object, **kwargs: Any) -> None:
        """Logs a warning the first time that this logger sees it."""
        said: set[tuple[str, tuple[object, ...]]] = self.__dict__.setdefault("_said", set())
        if (msg, args) not in said:
            said.add((msg, args))
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.warning(msg, *args, **kwargs)


@checked_keywords
def get_logger(name: str, log_level: str | None = None) -> RankLogger:
    """A logger called `name` that speaks on the main process only, unless a call says otherwise.

    Args:
        name: usually `__name__`.
        log_level: level of this logger alone, such as "INFO"; where it is None, that of `PACELINE_LOG_LEVEL` if set.

    Ranks: works before there is an Accelerator: the rank is then read from the launcher's environment.

    Raises:
        ConfigError: `log-level`, for a level that logging does not know.

    Example:
        logger = get_logger(__name__, log_level="INFO")
        logger.info("read %d rows", rows, main_process_only=False)
    """
    logger = logging.getLogger(name)
    level = log_level
    source = "log_level"
    fix = 'use one of these, such as log_level="INFO"'
    if not level:
        level = env.get("PACELINE_LOG_LEVEL")
        source = "PACELINE_LOG_LEVEL"
        fix = "set PACELINE_LOG_LEVEL=INFO"
    if level:
        if str(level).upper() not in logging.getLevelNamesMapping():
            raise ConfigError(
                "log-level",
                f"there is no log level {level!r}.",
                why=f"{source} = {level!r}; known: {', '.join(logging.getLevelNamesMapping())}",
                fix=fix,
            )
        logger.setLevel(str(level).upper())
    return RankLogger(logger, {})


def _here() -> tuple[int, int, bool]:
    """Rank, number of ranks, and whether they can wait for each other."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), True
    world = World.detect()
    return world.rank, world.size, False
