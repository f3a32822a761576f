"""`EngineScheduler`: what a script gets as its scheduler, which the engine steps already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.base.log import warn_once

if TYPE_CHECKING:
    from paceline_deepspeed.engine_parts import Engine


class EngineScheduler:
    """Looks like the scheduler inside. `engine.step()` steps it; a script that does so too would go twice as fast."""

    def __init__(self, prepared: Any, engine: Engine) -> None:
        self.prepared = prepared
        self.calls = 0  # of the script's own, to `step`
        self._engine = engine

    def step(self, *args: Any, **keywords: Any) -> None:
        """Does nothing without arguments; with them (a position, a metric) it is the scheduler's own.

        Once a script has called it as often as the engine stepped, this says so, with both numbers.
        """
        if args or keywords:
            self.prepared.scheduler.step(*args, **keywords)
            return
        self.calls += 1
        if self.calls == 1:
            steps = self._engine.global_steps
            applied = steps - self._engine.skipped_steps
            warn_once(
                "compat",
                f"`lr_scheduler.step()` is left out: `engine.step()` has stepped the scheduler already ({steps} optimizer "
                f"step{'s' * (steps != 1)} so far, {applied} scheduler step{'s' * (applied != 1)}; with yours there would be "
                f"{applied + 1}). Delete the line; or, where twice the pace is wanted, write the schedule so.",
            )

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Makes `isinstance(engine.lr_scheduler, WarmupLR)` hold, and that with a class of torch's."""
        return type(self.prepared.scheduler)

    def __getattr__(self, name: str) -> Any:
        if name in ("prepared", "_engine"):
            raise AttributeError(name)
        return getattr(self.prepared, name)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.prepared.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.prepared.load_state_dict(state_dict)
