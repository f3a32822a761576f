"""`PlainRecorder` records the script from before, which knows nothing of Paceline: `paceline verify --plain`.

The script runs as `python before.py` would: on one process, with the environment of the command and without a process group.
What `Recorder` learns from `prepare` and `backward` is seen from outside here:

    models    the outermost modules with trainable parameters whose `forward` runs; from the second call on, their inputs
    losses    the tensors whose `backward` is called
    steps     torch's hooks on all optimizers, as in `Recorder`
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from paceline.base import env as environment
from paceline.base.errors import ConfigError
from paceline.config import RunSettings
from paceline.launch.job import Target
from paceline_lens.verify.recorder import Recorder


class PlainRecorder(Recorder):
    """Records a script that does not use Paceline.

    Args:
        folder: where the recording goes.
        steps: steps of the first optimizer after which the script is ended.
        variables: the environment in which the script runs, except for the number of threads.
    """

    def __init__(self, folder: Path, steps: int, variables: Mapping[str, str]) -> None:
        super().__init__(folder, steps, as_written=True)
        self._variables = variables
        self._depth = 0  # of forward passes that are running

    def run(self, target: Target, compat: str = "") -> None:
        """Runs the script in this process."""
        # A script may branch by the variables that a launcher sets, such as RANK.
        launched = environment.snapshot()
        restored: dict[str, str | None] = dict.fromkeys(launched)
        restored |= self._variables
        restored["OMP_NUM_THREADS"] = launched.get("OMP_NUM_THREADS")
        environment.export(restored)
        self._quiet.listen(loss=self._note_loss)
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, always_call=True)
        super().run(target, "")

    def settings(self, settings: RunSettings) -> NoReturn:
        """Refuses a script that constructs an `Accelerator`.

        Raises:
            ConfigError: `verify-plain`.
        """
        raise ConfigError(
            "verify-plain",
            "the script that `--plain` names uses Paceline itself.",
            why="it constructs an `Accelerator`; `--plain` compares with the script from before it was changed",
            fix="give the script from before to `--plain`, and the changed one after the options: "
            "`paceline verify --plain before.py after.py`",
        )

    def _enter(self, module: nn.Module, args: object) -> None:
        self._depth += 1
        is_new = all(module is not model for model in self._models)
        # A loss may be a module, too, but it has nothing to train.
        if self._depth == 1 and is_new and any(parameter.requires_grad for parameter in module.parameters()):
            self._add_model(module)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        self._depth -= 1

    def _note_loss(self, loss: torch.Tensor) -> None:
        number = float(loss.detach().sum().double())
        self.recording.add("backward", loss=number, scaled=number, items=None, divided=False, draws=[])
