"""Lets models of transformers and peft be saved, and generate, where a plan has divided their parameters.

Scripts call `model.save_pretrained(folder)` and `model.generate(...)` on the module itself. Both read parameters outside of
`forward`, where each rank has only its parts. `paceline.compat` wraps these methods while the libraries are imported.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def save_whole_models(module: ModuleType) -> None:
    """Changes `PreTrainedModel` in `transformers.modeling_utils`, or `PeftModel` in `peft.peft_model`."""
    model_class = getattr(module, "PeftModel", None) or module.PreTrainedModel
    _gather_in(model_class, "save_pretrained")


def generate_with_whole_models(module: ModuleType) -> None:
    """Changes `GenerationMixin` in `transformers.generation.utils`."""
    _gather_in(module.GenerationMixin, "generate")


def _gather_in(model_class: Any, name: str) -> None:
    """Lets a method find whole parameters. Ranks: with a divided model all must call it."""
    # Imported late: names are also served to commands that need no torch. Here torch has been imported by the library.
    from paceline.run import live_runs
    from paceline.world.sharded import is_sharded

    method = getattr(model_class, name)

    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **options: Any) -> Any:
        # Whoever passes a state has gathered it, and may call the method on one rank alone.
        is_given = options.get("state_dict") is not None
        if is_given or not any(map(is_sharded, self.parameters())):
            return method(self, *args, **options)
        for run in live_runs():
            for entry in run.prepared.models:
                if any(part is self for part in entry.module.modules()):
                    # A rank that comes alone gets an error here, and does not wait for parts that nobody sends.
                    run.collectives.barrier(name)
                    with run.prepared.full_parameters(entry.module, writeback=False):
                        return method(self, *args, **options)
        return method(self, *args, **options)

    setattr(model_class, name, call)
