"""accelerate's `LocalSGD`: it averages after a number of calls of `step`, also of those within an accumulation window."""

from __future__ import annotations

from paceline_large.optim.local_sgd import LocalSGD as NativeLocalSGD


class LocalSGD(NativeLocalSGD):
    """Averages parameters every `local_sgd_steps` calls of `step`.

    The arguments and the ranks are those of the native class, which counts optimizer steps.
    """

    num_steps = property(lambda self: self.steps)

    def step(self) -> None:
        """Counts a micro-batch; call it in each one. Ranks: all."""
        self.count_step()
