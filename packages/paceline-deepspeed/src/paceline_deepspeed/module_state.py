"""The whole state of an engine's model, and loading it: methods of `DeepSpeedEngine`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.state.module_state import clean
from paceline_doors.absent import refuse

if TYPE_CHECKING:
    from paceline_deepspeed.engine_parts import Engine

KEY = "deepspeed"  # where the engine's own state lies among the counters of a checkpoint
COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # in it, and in DeepSpeed's files


def frozen_names(engine: Engine) -> set[str]:
    """Returns the names of the parameters that are not trained."""
    names: set[str] = set()
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            names.add(clean(name))
    return names


def module_state_dict(
    engine: Engine,
    destination: dict[str, Any] | None = None,
    prefix: str = "",
    keep_vars: bool = False,
    exclude_frozen_parameters: bool = False,
) -> dict[str, Any]:
    """Returns the whole state of the model, at every stage of ZeRO. Ranks: all.

    Args:
        destination: a dict that takes the entries, and is returned.
        prefix: stands before each name.
        keep_vars: leaves the parameters attached to the graph; refused, since whole parameters are copies.
        exclude_frozen_parameters: leaves out what is not trained.

    Raises:
        CompatError: `compat-name`.
    """
    if keep_vars:
        fix = "leave it out, and read gradients with `deepspeed.utils.safe_get_full_grad(parameter)`"
        refuse("module_state_dict(keep_vars=True)", "the state of a divided model is a copy", fix)
    state = engine.accelerator.get_state_dict(engine.prepared_model)
    if exclude_frozen_parameters:
        for name in frozen_names(engine):
            state.pop(name, None)
    if destination is None:
        destination = {}
    destination.update({prefix + name: value for name, value in state.items()})
    return destination


def load_module_state_dict(
    engine: Engine,
    checkpoint: Mapping[str, Any],
    strict: bool = True,
    custom_load_fn: Any = None,
    fetch_z3_params: bool = False,
    z3_params_to_fetch: object = None,
    allowed_missing_keys: Collection[str] = (),
) -> None:
    """Loads the whole state of the model: the dict itself, or one that holds it as "module". Ranks: all.

    Args:
        custom_load_fn: called as `custom_load_fn(src=state, dst=module)`, and loads in place of torch.
        allowed_missing_keys: names that the state may lack although it is strict.
        fetch_z3_params, z3_params_to_fetch: not needed; all parameters are whole while it loads.

    Raises:
        RuntimeError: torch's, for a state that does not fit.
    """
    state = checkpoint.get("module", checkpoint)
    with engine.accelerator.full_parameters(engine.prepared_model, writeback=True):
        if custom_load_fn is None:
            entries = dict(state)
            if strict and allowed_missing_keys:
                # torch knows no such list: under these names it gets the values that the model has.
                values_now = engine.module.state_dict()
                for name in values_now.keys() & set(allowed_missing_keys):
                    entries.setdefault(name, values_now[name])
            engine.module.load_state_dict(entries, strict=strict)
        else:
            custom_load_fn(src=state, dst=engine.module)
