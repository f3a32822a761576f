"""How many ranks read samples of their own: the W of the batch triangle."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.config.overrides import Overrides
from paceline.config.sources import resolve_run
from paceline_deepspeed.config import DeepSpeedConfig
from paceline_deepspeed.semantics import DEEPSPEED


def data_ranks(config: DeepSpeedConfig, processes: int, env: Mapping[str, str]) -> int:
    """Returns how many processes read samples of their own; the others share those, as tensor parallel does.

    Args:
        config: of the script.
        processes: of the run.
        env: variables, in which the launcher hands over what the command line said.

    Raises:
        ConfigError, PlanError: those of the settings.
    """
    from paceline.plan.plan import Decision
    from paceline.plan.resolve import draft

    resolved = resolve_run(Overrides(plan=config.given), env)
    decisions = [Decision(**vars(choice)) for choice in resolved.decisions]
    return draft(resolved.settings, decisions, processes, DEEPSPEED).layout.width
