"""DeepSpeed's calls for checkpoints, on ours: any stage and width loads what any other has saved.

    SAVE_DIR/latest            the newest tag, written last
    SAVE_DIR/zero_to_fp32.py   makes whole weights of it, where a ZeRO stage is on
    SAVE_DIR/global_step4/     a checkpoint of ours: models, optimizers, schedulers, loss scale, random streams, the
                               accumulation window, counters and the script's own `client_state`

Folders that DeepSpeed itself wrote are read too (`checkpoint_format`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from paceline.base.errors import ConfigError
from paceline.base.log import logger, warn_once
from paceline.checkpoint.agree import agreed
from paceline.checkpoint.files import replacing, writing
from paceline.checkpoint.state.module_state import clean
from paceline.checkpoint.store import Store, confined, store_for
from paceline.world.arrived import as_bytes
from paceline_deepspeed import module_state
from paceline_deepspeed.checkpoint_format import LATEST, tag_in

# What reads and writes weights is imported where it is called: it loads torch.distributed.checkpoint, and the engine's class
# is imported long before.
if TYPE_CHECKING:
    from paceline.checkpoint.weights.divided import DividedModel
    from paceline.checkpoint.weights.export import RowsOfTensor
    from paceline_deepspeed.config import DeepSpeedConfig
    from paceline_deepspeed.engine_parts import Engine

_ALL = frozenset({"models", "optimizers", "schedulers", "custom", "scaler", "rng", "window"})
_EVERY_RANK = "call it on every rank, outside of `if rank == 0`: each writes its part"


# -- save ------------------------------------------------------------------------------------------------------------


def save_checkpoint(
    engine: Engine,
    save_dir: str | os.PathLike[str],
    tag: object = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    *,
    ckpt_id: object = None,
    client_sd: Mapping[str, Any] | None = None,
) -> bool:
    """Saves everything that a resume needs under `save_dir/tag`; returns True.

    Args:
        tag: anything that `str` makes a name of; None is `global_step{N}`.
        client_state: tensors, numbers, text, containers and `argparse.Namespace`; rank 0's counts.
        save_latest: whether `latest` names this one.
        exclude_frozen_parameters: leaves parameters that are not trained out; a load keeps those that are there.
        ckpt_id, client_sd: other names of `tag` and `client_state`.

    Ranks: all.

    Raises:
        ConfigError: `deepspeed-save-dir`, `deepspeed-tag`, `deepspeed-alias`.
        CheckpointError: `checkpoint-ranks-missing` within seconds; those of `Accelerator.save_state`.
    """
    tag = _either("tag", tag, "ckpt_id", ckpt_id)
    client_state = _either("client_state", client_state, "client_sd", client_sd)
    if not engine.accelerator.states.writes:
        return True
    engine.attendance.call("save_checkpoint", _EVERY_RANK)
    folder = _folder(save_dir)
    if tag is None:
        tag = f"global_step{engine.global_steps}"
    tag = _agreed_tag(engine, str(tag))
    accelerator = engine.accelerator
    store = store_for(folder)
    # What only the engine knows travels with the run's counters, for as long as the save takes.
    extra = accelerator.states.counters.extra
    # A dictionary, because those of the ranks are united: in a pipeline each has the names of its own stage.
    extra[module_state.KEY] = {"frozen_parameters": dict.fromkeys(module_state.frozen_names(engine), True)}
    if accelerator.is_main_process:
        extra[module_state.KEY] |= {
            "counters": {name: getattr(engine, name) for name in module_state.COUNTERS},
            "window": [engine.steps_in_window, engine.batch.accumulate],
            "client_state": dict(client_state or {}),
            # The schedule of the loss scale is the config's, and a universal checkpoint needs it too.
            "loss_scale": engine.view.dynamic_loss_scale_args(),
            "counts_in_numbers": _counts_in_numbers(engine.config),
        }
    try:
        accelerator.states.save(store.join(folder, tag), frozen=not exclude_frozen_parameters)
    finally:
        extra.pop(module_state.KEY, None)

    def write_beside() -> None:
        # Last, and `latest` after all: whoever follows it gets a whole checkpoint.
        if engine.view.zero_optimization():
            from paceline_deepspeed.consolidation import SCRIPT

            _write(store, folder, "zero_to_fp32.py", SCRIPT)
        if save_latest:
            _write(store, folder, "latest", tag)

    accelerator.states.on_main(write_beside)
    return True


def _counts_in_numbers(config: DeepSpeedConfig) -> bool:
    """Whether DeepSpeed would step with an Adam of its own, whose count of steps is a number and not a tensor as torch's."""
    own = str(config["optimizer.type"]).lower() in ("adam", "adamw")
    return own and not (config["optimizer.params"] or {}).get("torch_adam", False)


def _folder(save_dir: object) -> str:
    if not save_dir or not isinstance(save_dir, (str, os.PathLike)):
        raise ConfigError(
            "deepspeed-save-dir",
            f"save_checkpoint needs the name of a folder, and was given {save_dir!r}.",
            why="checkpoints lie in SAVE_DIR/TAG, and SAVE_DIR/latest names the newest",
            fix="pass one, such as save_checkpoint('checkpoints')",
        )
    return os.fspath(save_dir)


def _agreed_tag(engine: Engine, tag: str) -> str:
    """Returns rank 0's tag after the check that `checkpoint.tag_validation` asks for. Ranks: all."""
    tags = engine.accelerator.collectives.gather_object(tag)
    mode = str(engine.config["checkpoint.tag_validation"]).upper()
    if len(set(tags)) == 1 or mode == "IGNORE":
        return str(tags[0])
    listed = ", ".join(f"rank {rank}: {own_tag!r}" for rank, own_tag in enumerate(tags[:8]))
    if mode == "FAIL":
        raise ConfigError(
            "deepspeed-tag",
            "the ranks save one checkpoint under several tags.",
            why=[listed, "checkpoint.tag_validation is FAIL"],
            fix="leave out of the tag what differs between ranks (the rank, a time of day)",
        )
    if engine.accelerator.is_main_process:
        logger("compat").warning(
            "the ranks save one checkpoint under several tags (%s): %r is taken, for a checkpoint is one folder. "
            "Leave out of the tag what differs between ranks.",
            listed,
            tags[0],
        )
    return str(tags[0])


def _either(name: str, value: object, alias: str, other: object) -> Any:
    """Returns the value that was given under one of two names."""
    if value and other is not None and value != other:
        raise ConfigError(
            "deepspeed-alias",
            f"{name} and {alias} are one thing, and were given different values.",
            why=f"{name}={value!r}, {alias}={other!r}",
            fix=f"write {name} alone",
        )
    if other is not None:
        return other
    return value


def _write(store: Store, folder: str, name: str, text: str) -> None:
    """Writes a small file beside the checkpoints."""
    path = store.join(store.resolve(folder), name)
    with writing(f"writing {path}"):
        # On a disk the new file takes the older one's place at once, so that nobody reads half of it.
        opened: AbstractContextManager[BinaryIO] = replacing(path, follow=False)
        if "://" in path:
            opened = store.open(path, "wb")
        with opened as file:
            file.write(text.encode())


# -- load ------------------------------------------------------------------------------------------------------------


def load_checkpoint(
    engine: Engine,
    load_dir: str | os.PathLike[str],
    tag: object = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
    *,
    ckpt_id: object = None,
) -> tuple[str | None, dict[str, Any] | None]:
    """Loads `load_dir/tag`, at any stage and width; `(path, client_state)`, or `(None, None)` with a warning.

    Args:
        tag: None takes what `latest` says.
        load_module_strict: whether names of parameters must agree; shapes must always.
        load_optimizer_states, load_lr_scheduler_states: whether these are loaded, where the engine has an optimizer and a
            scheduler.
        load_module_only: the model alone.
        custom_load_fn: called with `src=` (the saved state, whole tensors by name) and `dst=` (the module) in place of a
            load of the model.
        ckpt_id: another name of `tag`.

    Ranks: all.

    Raises:
        CheckpointError: those of `Accelerator.load_state`; nothing was touched.
    """
    accelerator = engine.accelerator
    tag = _either("tag", tag, "ckpt_id", ckpt_id)
    engine.attendance.call("load_checkpoint", "call it on every rank, outside of `if rank == 0`")
    folder = os.fspath(load_dir)
    store = store_for(folder)
    if tag is None:
        tag = _latest(engine, store, folder)
        if tag is None:
            return None, None
    tag = str(tag)
    path = store.join(folder, tag)
    states = accelerator.states
    only = set(_ALL)
    if load_module_only:
        only = {"models"}
    # An engine for evaluation has no optimizer, and another one may have no scheduler: their states are left out.
    if not load_optimizer_states or engine.optimizer is None:
        only -= {"optimizers", "scaler", "window"}
    if not load_lr_scheduler_states or engine.lr_scheduler is None:
        only.discard("schedulers")
    if custom_load_fn is not None:
        only.discard("models")
    # A load always takes the run's counters, because the engine's state travels with them.
    counters_before = states.counters.state_dict()
    states.load(path, load_module_strict, only)
    if custom_load_fn is not None:
        from paceline.checkpoint.weights.opening import open_weights
        from paceline.checkpoint.weights.sources import read_whole

        weights = open_weights(path)
        # Every rank reads all tensors: the function loads whole parameters on each.
        saved_state = {name: read_whole(weights, name) for name in weights.entries}
        with accelerator.full_parameters(engine.prepared_model, writeback=True):
            custom_load_fn(src=saved_state, dst=engine.module)
    engine_state = states.counters.extra.pop(module_state.KEY, {})
    if load_module_only:
        states.counters.load_state_dict(counters_before)
    else:
        _take_counters(engine, engine_state, with_window="window" in only)
    return path, dict(engine_state.get("client_state", {}))


def _latest(engine: Engine, store: Store, folder: str) -> str | None:
    """Reads the tag in the file `latest`; None, with a warning, where there is no such file. Ranks: all.

    With `checkpoint.load_universal` the file `latest_universal` of a converted checkpoint comes first.
    """
    names = LATEST
    if engine.config["checkpoint.load_universal"]:
        names = (LATEST[1], LATEST[0])

    def read() -> str | None:
        for name in names:
            path = store.join(store.resolve(folder), name)
            if store.exists(path):
                with store.open(path, "rb") as file:
                    tag = tag_in(file.read())
                confined(store, folder, tag, path)
                return tag
        return None

    accelerator = engine.accelerator
    tag = agreed(accelerator.collectives, f"reading {folder}/latest", read)
    if tag is None and accelerator.is_main_process:
        logger("compat").warning(
            "there is no file `latest` in %s: nothing was loaded. Name the checkpoint, load_checkpoint(dir, tag), "
            "or the folder that save_checkpoint was given.",
            folder,
        )
    return tag


def _take_counters(engine: Engine, engine_state: Mapping[str, Any], with_window: bool) -> None:
    """Takes the counters of a checkpoint; of a window with another number of micro-batches, the same part is done.

    Without the gradients of that window its micro-batches do not count. The engine goes on with the window that it has, as
    under DeepSpeed, which saves neither gradients nor `micro_steps`.
    """
    for name, value in engine_state.get("counters", {}).items():
        setattr(engine, name, value)
    if not with_window:
        engine.restart_window(engine.steps_in_window)
        return
    # A folder of DeepSpeed's has no such entry: it counts as saved between two windows.
    done, steps = engine_state.get("window", (0, 1))
    num_inside, remainder = divmod(done * engine.batch.accumulate, steps)
    if remainder:
        warn_once(
            "compat",
            f"the window was saved after {done} of {steps} micro-batches, which is no whole number of "
            f"{engine.batch.accumulate}: this one step takes other samples than it would have.",
        )
    engine.restart_window(num_inside)


# -- 16 bits ---------------------------------------------------------------------------------------------------------


class _Cast:
    """Whole tensors in another precision, cast as they are written.

    Args:
        source: of the tensors.
        dtype: of floating-point ones.
        rank: of this process among those that hold the model.
    """

    def __init__(self, source: DividedModel, dtype: torch.dtype, rank: int) -> None:
        self._source = source
        self._rank = rank
        self._source_entries = {entry.name: entry for entry in source.entries}
        self.entries = []
        for entry in source.entries:
            if entry.dtype.is_floating_point:
                entry = replace(entry, dtype=dtype)
            self.entries.append(entry)

    def fetch(self, wanted: Sequence[Sequence[RowsOfTensor]]) -> list[torch.Tensor]:
        """Fetches the bytes of the rows that this rank wants. Ranks: all."""
        # The source knows tensors in their own precision: it is asked for the same rows of those.
        source_rows: list[list[RowsOfTensor]] = []
        for rows_of_rank in wanted:
            rows_in_source: list[RowsOfTensor] = []
            for rows in rows_of_rank:
                entry = self._source_entries[rows.entry.name]
                rows_in_source.append(replace(rows, entry=entry))
            source_rows.append(rows_in_source)
        fetched = self._source.fetch(source_rows)
        cast_rows = []
        for data, rows in zip(fetched, wanted[self._rank], strict=True):
            source_dtype = self._source_entries[rows.entry.name].dtype
            dtype = rows.entry.dtype
            if source_dtype != dtype:
                data = as_bytes(data.view(source_dtype).to(dtype))
            cast_rows.append(data)
        return cast_rows


def save_16bit_model(
    engine: Engine,
    save_dir: str | os.PathLike[str],
    save_filename: str = "pytorch_model.bin",
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Writes the whole model into one file in the run's 16-bit precision (as it is under fp32), at every stage.

    Tensors come together row by row: no rank holds the whole model. Returns True.

    Ranks: all.

    Raises:
        CheckpointError: `checkpoint-ranks-missing`; those of `Accelerator.save_model`. An older file stays whole.
    """
    from paceline.checkpoint.weights.divided import DividedModel
    from paceline.checkpoint.weights.export import export_weights

    if not engine.accelerator.states.writes:
        return True
    engine.attendance.call("save_16bit_model", _EVERY_RANK)
    accelerator = engine.accelerator
    folder = _folder(save_dir)
    names, tied = accelerator.run.prepared.names_of(engine.prepared_model)
    source = DividedModel.of(engine.module, accelerator.collectives, names, tied)
    if exclude_frozen_parameters:
        frozen = module_state.frozen_names(engine)
        source.entries = [entry for entry in source.entries if clean(entry.name) not in frozen]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    safe = save_filename.endswith(".safetensors")
    cast: DividedModel | _Cast = source
    if dtype is not None:
        cast = _Cast(source, dtype, accelerator.collectives.rank)
    export_weights(cast, folder, safe_serialization=safe, peers=accelerator.collectives, file_name=save_filename)
    return True
