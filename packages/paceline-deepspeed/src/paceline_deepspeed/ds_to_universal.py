"""`deepspeed.checkpoint.ds_to_universal`: a checkpoint, ours or DeepSpeed's, as a universal one that both libraries read.

    python -m paceline_deepspeed.ds_to_universal --input_folder SAVE_DIR/TAG --output_folder SAVE_DIR/TAG_universal

Under DeepSpeed's names it is `python -m deepspeed.checkpoint.ds_to_universal`. Ours needs no conversion to be loaded at another
width or stage; DeepSpeed reads a checkpoint of ours in this form alone. One tensor at a time is in memory, and what is not
trained.

    TAG_universal/zero/NAME/fp32.pt, exp_avg.pt, step.pt, ...     each tensor whole, with the states of its optimizer
    TAG_universal/zero/optimizer_state.pt                         groups, loss scale
    TAG_universal/mp_rank_00_model_states.pt                      for stages 1 and 2: counters, schedule, what is not trained
    TAG_universal/zero_pp_rank_0_mp_rank_00_model_states.pt       the same file, for stage 3
    latest_universal                                              names it, beside the folder
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline.base.errors import CheckpointError
from paceline.checkpoint.agree import WriterPeers
from paceline.checkpoint.checkpointer import Checkpointer
from paceline.checkpoint.files import replacing, save_object, writing
from paceline.checkpoint.format.checkpoint_format import Claimed, format_of
from paceline.checkpoint.format.manifest import STATE, Manifest, read_json
from paceline.checkpoint.state.codec import decode, references
from paceline.checkpoint.state.train_state import TrainState
from paceline.checkpoint.store import store_for
from paceline.checkpoint.weights.sources import DividedWeights, Weights, read_whole
from paceline_deepspeed import VERSION
from paceline_deepspeed.checkpoint_format import DeepSpeedFormat
from paceline_deepspeed.checkpoint_format_universal import open_folder
from paceline_deepspeed.module_state import COUNTERS, KEY

_OPTIMIZER = "optimizer_state.pt"
_ZERO_STAGE = 1  # of the form that is written: what is not trained lies whole in the model's file


@dataclass(frozen=True)
class ReadRun:
    """What a universal checkpoint is made of.

    Attributes:
        weights: the whole model, trained parameters in float32.
        aliases: the other names of tied tensors, each with the one that `weights` has.
        frozen: parameters that are not trained.
        groups: for each group of the optimizer, its parameters.
        options: the hyper-parameters of each group.
        tensors: states of the optimizer with a parameter's shape: for each key, whole tensors by the parameter's name.
        others: the other states of each parameter, such as a count of steps.
        scheduler: the state of the schedule, or None.
        scale: attributes of DeepSpeed's dynamic loss scale, or None.
        counters: `global_steps`, `global_samples`, `skipped_steps`.
        client_state: the script's own.
    """

    weights: Weights
    aliases: dict[str, str]
    frozen: set[str]
    groups: list[list[str]]
    options: list[dict[str, Any]]
    tensors: dict[str, Weights]
    others: dict[str, dict[str, Any]]
    scheduler: Any
    scale: dict[str, Any] | None
    counters: dict[str, int]
    client_state: dict[str, Any]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads DeepSpeed's arguments."""
    parser = argparse.ArgumentParser(
        prog="ds_to_universal", description="Writes a checkpoint in the form that DeepSpeed loads at any width."
    )
    parser.add_argument("--input_folder", required=True, help="SAVE_DIR/TAG, a checkpoint of Paceline or DeepSpeed")
    parser.add_argument("--output_folder", required=True, help="the folder that is written")
    for name in ("num_extract_workers", "num_merge_workers"):
        parser.add_argument(f"--{name}", type=int, help="no effect: one process reads and writes tensor by tensor")
    parser.add_argument("--keep_temp_folder", action="store_true", help="no effect: there is none")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="no effect")
    parser.add_argument("--inject_missing_state", action="store_true", help="no effect: nothing is missing")
    return parser.parse_args(words)


def main(args: argparse.Namespace | None = None) -> None:
    """Converts a checkpoint; `args` are those of `parse_arguments`, by default of the command line.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-unsafe`, `checkpoint-foreign`.
    """
    if args is None:
        args = parse_arguments()
    convert(args.input_folder, args.output_folder)
    print(f"{args.output_folder} is a universal checkpoint of {args.input_folder}.")


def convert(folder: str, output: str) -> None:
    """Writes the checkpoint in `folder` as a universal one, and names it in `latest_universal` beside it.

    An older conversion in `output` stays until the new one is whole.
    """
    output = os.path.abspath(output)
    _check_replaceable(output)
    Checkpointer().save(output, TrainState(), writer=partial(_write_folder, read_run(folder)))
    parent, name = os.path.split(output)
    with writing(f"writing {output}"), replacing(os.path.join(parent, "latest_universal"), follow=False) as file:
        file.write(name.encode())


def _write_folder(run: ReadRun, _: WriterPeers, claimed: Claimed) -> Callable[[WriterPeers], int]:
    """Writes the files of a universal checkpoint, tensor by tensor; a `FolderWriter`."""

    def write(_: WriterPeers) -> int:
        store = claimed.store
        staged = claimed.staged
        zero = os.path.join(staged, "zero")
        with writing(f"writing {claimed.home}"):
            _write_parameters(run, zero)
            with _named_as_theirs():
                save_object(_optimizer_state(run), os.path.join(zero, _OPTIMIZER))
            for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
                save_object(_model_state(run), os.path.join(staged, name))
            # What is replaced is a universal checkpoint, and nothing else (`_check_replaceable`).
            store.publish(staged, claimed.home, last=_OPTIMIZER, owned=lambda folder: list(store.files(folder)))
        return 0

    return write


def _check_replaceable(output: str) -> None:
    """Refuses a folder that is neither empty nor a universal checkpoint.

    Raises:
        CheckpointError: `checkpoint-foreign`.
    """
    if not os.path.exists(output) or (os.path.isdir(output) and not os.listdir(output)):
        return
    if not os.path.isfile(os.path.join(output, "zero", _OPTIMIZER)):
        raise CheckpointError(
            "checkpoint-foreign",
            f"{output} is there already, and is no universal checkpoint.",
            why="a conversion replaces the whole folder, and an older conversion alone",
            fix="name another --output_folder",
        )


# -- what is read ----------------------------------------------------------------------------------------------------


def read_run(folder: str) -> ReadRun:
    """Opens a checkpoint, ours or DeepSpeed's, of one model and one optimizer.

    Raises:
        CheckpointError: `checkpoint-missing`, `checkpoint-damaged`, `checkpoint-unsafe`, `checkpoint-foreign`.
    """
    store = store_for(folder)
    home = store.resolve(folder)
    checkpoint_format = format_of(store, home)
    if isinstance(checkpoint_format, DeepSpeedFormat):
        return _of_deepspeed(home)
    if checkpoint_format is None or not checkpoint_format.has_manifest:
        raise CheckpointError(
            "checkpoint-missing",
            f"{folder} is no checkpoint of Paceline or DeepSpeed.",
            why="--input_folder is the folder of one checkpoint, SAVE_DIR/TAG",
            fix=f"name one that lies in it, such as {os.path.join(folder, 'global_step4')}",
        )
    place = Manifest.read(store, home).place(store, home)
    return _of_paceline(folder, read_json(store, store.join(place, STATE)), DividedWeights(store, place))


def _of_deepspeed(folder: str) -> ReadRun:
    saved = open_folder(folder)
    if saved.shapes is None:
        raise CheckpointError(
            "checkpoint-foreign",
            f"{folder} was written by DeepSpeed's stage 0, of which no universal checkpoint is made.",
            why="there the optimizer numbers its parameters, and no file says which these are",
            fix="load it in a run of Paceline, which needs no conversion, save it there, and convert what was saved",
        )
    moments, others = saved.moments()
    options = []
    for group in saved.optimizer["param_groups"]:
        options.append({key: value for key, value in group.items() if key != "params"})
    return ReadRun(
        weights=saved.weights,
        aliases=saved.aliases,
        frozen=set(saved.first.get("frozen_param_shapes") or ()),
        groups=[list(group) for group in saved.shapes],
        options=options,
        tensors=dict(moments),
        others=others,
        scheduler=saved.first.get("lr_scheduler"),
        scale=saved.dynamic_scale,
        counters={name: saved.first.get(name, 0) for name in COUNTERS},
        client_state=saved.client_state,
    )


def _of_paceline(folder: str, saved: dict[str, Any], tensors: DividedWeights) -> ReadRun:
    for kind in ("models", "optimizers"):
        if len(saved[kind]) != 1:
            raise CheckpointError(
                "checkpoint-foreign",
                f"{folder} holds {len(saved[kind])} {kind}, and a universal checkpoint holds one.",
                why="DeepSpeed's engine has one model and one optimizer",
                fix="export the weights of each: `paceline checkpoint export --model NAME FOLDER OUT`",
            )
    ((model, model_state),) = saved["models"].items()
    (optimizer_state,) = saved["optimizers"].values()

    def value(encoded: Any) -> Any:
        return decode(encoded, {path: read_whole(tensors, path) for path in references(encoded)})

    extra = saved["run"]["extra"].get(KEY, {})
    prefix = f"models/{model}/"
    weights = _TensorsUnderPaths(
        tensors, {name.removeprefix(prefix): name for name in tensors.entries if name.startswith(prefix)}
    )
    strangers = sorted(optimizer_state["members"].keys() - weights.entries.keys())
    if strangers:
        raise CheckpointError(
            "checkpoint-foreign",
            f"the optimizer of {folder} steps {len(strangers)} tensors that the model does not have.",
            why=f"such as {strangers[0]}; a universal checkpoint holds the states of the model's parameters",
            fix="register them in the model, and save again",
        )
    groups: list[list[str]] = [[] for _ in optimizer_state["groups"]]
    for name, number in optimizer_state["members"].items():
        groups[number].append(name)
    paths_by_key: dict[str, dict[str, str]] = {}
    others: dict[str, dict[str, Any]] = {}
    for name in optimizer_state["members"]:
        others[name] = {}
        for key, encoded in optimizer_state["state"].get(name, {}).items():
            path = encoded.get("$tensor") if isinstance(encoded, dict) else None
            if path is not None and tensors.entries[path].shape == weights.entries[name].shape and key != "step":
                paths_by_key.setdefault(key, {})[name] = path
            else:
                others[name][key] = value(encoded)
        if extra.get("counts_in_numbers") and "step" in others[name]:
            others[name]["step"] = int(others[name]["step"])
    counters = {"global_steps": saved["run"]["step"], "global_samples": 0, "skipped_steps": 0}
    schedulers = list(saved["schedulers"].values())
    scheduler = None
    if len(schedulers) == 1:
        scheduler = value(schedulers[0]["state"])
    scale = None
    if saved["scaler"] is not None and saved["scaler"]["growth_factor"] != 1.0:
        scale = _scale_of(saved["scaler"], extra.get("loss_scale", {}))
    return ReadRun(
        weights=weights,
        aliases=dict(model_state["aliases"]),
        frozen=set(extra.get("frozen_parameters", ())) & weights.entries.keys(),
        groups=groups,
        options=[value(group) for group in optimizer_state["groups"]],
        tensors={key: _TensorsUnderPaths(tensors, paths) for key, paths in paths_by_key.items()},
        others=others,
        scheduler=scheduler,
        scale=scale,
        counters={**counters, **extra.get("counters", {})},
        client_state=value(extra.get("client_state", {})),
    )


class _TensorsUnderPaths:
    """Some of the tensors of others, under other names.

    Args:
        weights: the tensors.
        names: other name -> name there.
    """

    def __init__(self, weights: Weights, names: Mapping[str, str]) -> None:
        self.entries = {name: weights.entries[theirs] for name, theirs in names.items()}
        self._weights = weights
        self._names = names

    def read(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Reads a box of one tensor."""
        return self._weights.read(self._names[name], box)


def _scale_of(scaler: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of DeepSpeed's dynamic loss scale that goes on as ours would.

    DeepSpeed counts all steps and remembers the last overflow, and ours counts good steps after the first.
    """
    return {
        "cur_scale": scaler["scale"],
        "cur_iter": scaler["_growth_tracker"] + 1,
        "last_overflow_iter": -1,
        "scale_factor": scaler["growth_factor"],
        "scale_window": scaler["growth_interval"],
        "min_scale": options.get("min_scale", 1),
        "delayed_shift": options.get("delayed_shift", 2),
        "cur_hysteresis": scaler.get("_hysteresis", options.get("delayed_shift", 2)),
        "consecutive_hysteresis": options.get("consecutive_hysteresis", False),
        "raise_error_at_min_scale": True,
        "dynamic": True,
        "dtype": torch.float16,
    }


# -- what is written -------------------------------------------------------------------------------------------------


def _write_parameters(run: ReadRun, folder: str) -> None:
    """Writes the files of each tensor, one tensor after the other."""
    trained = {name for group in run.groups for name in group}
    for name, entry in run.weights.entries.items():
        own_folder = os.path.join(folder, name)
        _write_tensor(own_folder, "fp32", read_whole(run.weights, name).float())
        if name not in trained:
            continue
        for key, weights in run.tensors.items():
            # Where one parameter of a group has a state, DeepSpeed reads it of all.
            state = torch.zeros(entry.shape)
            if name in weights.entries:
                state = read_whole(weights, name)
            _write_tensor(own_folder, key, state)
        step = run.others.get(name, {}).get("step")
        if step is not None:
            save_object(step, os.path.join(own_folder, "step.pt"))


def _write_tensor(folder: str, key: str, tensor: Tensor) -> None:
    # A copy: of a view, torch would write the whole vector in which it lies.
    save_object({"param": tensor.clone(), "cat_dim": 0}, os.path.join(folder, f"{key}.pt"))


def _optimizer_state(run: ReadRun) -> dict[str, Any]:
    """Returns what is the same for all parameters, in the forms of stages 1 to 3."""
    groups = [{**options, "params": [number]} for number, options in enumerate(run.options)]
    steps = [state["step"] for state in run.others.values() if "step" in state]
    first: dict[str, Any] = {}
    if steps:
        first["step"] = steps[0]
    state = {
        "ds_version": VERSION,
        "zero_stage": _ZERO_STAGE,
        "overflow": False,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: first}, "param_groups": groups},
    }
    if run.scale is not None:
        scale = _Scale()
        vars(scale).update(run.scale)
        state |= {"dynamic_loss_scale": True, "loss_scaler": scale}
    return state


def _model_state(run: ReadRun) -> dict[str, Any]:
    """Returns the file of the model: all that is not trained, and the run's counters."""
    entries = run.weights.entries
    shapes = [{name: torch.Size(entries[name].shape) for name in group} for group in run.groups]
    trained = {name for group in run.groups for name in group}
    module: dict[str, Tensor] = {}
    for name in entries:
        if name not in trained:
            module[name] = read_whole(run.weights, name).clone()
    return {
        "module": module,
        "buffer_names": [name for name in module if name not in run.frozen],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": {name: torch.Size(entries[name].shape) for name in run.frozen if name in entries},
        "frozen_param_fragments": None,
        "shared_params": run.aliases,
        "lr_scheduler": run.scheduler,
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        **run.counters,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
        **run.client_state,
    }


# Of DeepSpeed's class, which is pickled by its name; its attributes are all that it has.
_Scale = type("DynamicLossScaler", (), {"__module__": "deepspeed.runtime.fp16.loss_scaler"})


@contextmanager
def _named_as_theirs() -> Iterator[None]:
    """Lets `_Scale` be found under its name, where pickle looks before it writes the name; DeepSpeed need not be installed."""
    words = _Scale.__module__.split(".")
    names = [".".join(words[:count]) for count in range(1, len(words) + 1)]
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    module = ModuleType(names[-1])
    vars(module)[_Scale.__name__] = _Scale
    # Python 3.11 looks for the packages around a module, too.
    for name in names:
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules[names[-1]] = module
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


if __name__ == "__main__":
    main()
