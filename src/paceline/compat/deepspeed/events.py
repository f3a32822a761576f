"""`Events`: what an engine tells after a step: monitors, and a line every `steps_per_print` steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.compat.deepspeed.monitors import Monitors
from paceline.compat.deepspeed.profiling import Timers

if TYPE_CHECKING:
    from paceline.compat.deepspeed.engine import DeepSpeedEngine


class Events:
    """Of one engine.

    Args:
        engine: its owner.

    Attributes:
        monitors: where events go.
        timers: tell how long phases take, where the config asks for it.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self.monitors = Monitors(engine.config, is_main=engine.accelerator.is_main_process)
        self.timers = Timers(engine)

    def after_step(self, boundary: bool) -> None:
        """Tells what is due after a micro-batch; `boundary` where it ended a window."""
        engine = self._engine
        self.timers.after_step(boundary)
        if not (boundary and engine.accelerator.is_main_process):
            return
        if self.monitors.enabled:
            self.monitors.write_events(self._values())
        every = engine.config["steps_per_print"]
        if every and engine.global_steps % every == 0:
            scale = f", loss scale={engine.loss_scale():g}" if engine.fp16_enabled() else ""
            print(
                f"step={engine.global_steps}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, "
                f"mom={engine.get_mom()}{scale}",
                flush=True,
            )

    def _values(self) -> list[tuple[str, Any, int]]:
        engine = self._engine
        found = [("Train/Samples/lr", float(engine.get_lr()[0]), engine.global_samples)]
        if engine.fp16_enabled():
            found.append(("Train/Samples/loss_scale", engine.loss_scale(), engine.global_samples))
        if engine.wall_clock_breakdown():
            found += [(f"Train/Samples/{name}", ms, engine.global_samples) for name, ms in self.timers.values()]
        return found
