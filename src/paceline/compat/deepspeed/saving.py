"""`Saving`: the engine's calls for checkpoints; what they do stands in `checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from paceline.accelerator import Accelerator
from paceline.base.errors import ConfigError, Problem


def _one(name: str, value: Any, alias: str, other: Any) -> Any:
    """The value that was given under one of two names."""
    if value and other is not None and value != other:
        raise ConfigError.of([
            Problem(
                "deepspeed-alias",
                f"{name} and {alias} are one thing, and were given different values.",
                why=f"{name}={value!r}, {alias}={other!r}",
                fix=f"write {name} alone",
            )
        ])  # fmt: skip
    return other if other is not None else value


class Saving:
    """Part of the engine. Ranks: all call each of these."""

    accelerator: Accelerator
    module: nn.Module
    _wrapped: list[Any]

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        ckpt_id: Any = None,
        client_sd: Mapping[str, Any] | None = None,
    ) -> bool:
        """Saves everything that a resume needs under `save_dir/tag`; returns True.

        Args:
            tag: None names it after the optimizer steps.
            client_state: the script's own, which `load_checkpoint` gives back.
            save_latest: whether a load without a tag finds this one.
            exclude_frozen_parameters: leaves out what is not trained.
            ckpt_id, client_sd: other names of `tag` and `client_state`.
        """
        tag = _one("tag", tag, "ckpt_id", ckpt_id)
        state = _one("client_state", client_state, "client_sd", client_sd)
        from paceline.compat.deepspeed import checkpoint

        return checkpoint.save(self, save_dir, tag, dict(state or {}), save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        *,
        ckpt_id: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads what `save_checkpoint` saved, at any stage and number of ranks.

        Returns the path and the script's own state; two Nones, with a warning, where there is none.
        """
        tag = _one("tag", tag, "ckpt_id", ckpt_id)
        from paceline.compat.deepspeed import checkpoint

        return checkpoint.load(
            self, load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
            custom_load_fn,
        )  # fmt: skip

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the whole model into one file; returns True."""
        from paceline.compat.deepspeed import checkpoint

        return checkpoint.save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The whole state of the model, at every stage."""
        state = self.accelerator.get_state_dict(self._wrapped[0])
        idle = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        return {name: value for name, value in state.items() if not (exclude_frozen_parameters and name in idle)}

    _zero3_consolidated_16bit_state_dict = module_state_dict  # what transformers and accelerate call at stage 3

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, **ignored: Any) -> None:
        """Loads the whole state of the model: the dict itself, or one that holds it as "module"."""
        state = checkpoint.get("module", checkpoint)
        with self.accelerator.full_parameters(self._wrapped[0], writeback=True):
            self.module.load_state_dict(state, strict=strict)
