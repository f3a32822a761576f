"""`TrainState`: everything that a run needs to resume, each part under the name of its owner.

    models/NAME/PARAMETER                   tensors
    optimizers/NAME/PARAMETER/KEY           tensors; hyper-parameters and numbers as JSON
    schedulers, loaders, custom / NAME      the results of their `state_dict`
    scaler, run                             the loss scale; counters
    window/RANK/NAME                        gradients of each rank that were not stepped yet; see `window`
    rng/RANK                                the states of each rank's random number generators

Nothing here communicates or accesses files; `checkpointer` does.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.base.errors import CheckpointError, Problem
from paceline.checkpoint.state.codec import Encoder, decode, references
from paceline.checkpoint.state.match import Mismatch, owner_problems
from paceline.checkpoint.state.module_state import ModuleState, parameter_names, unwrap
from paceline.checkpoint.state.optimizer_state import OptimizerState
from paceline.checkpoint.state.run_state import RunState, Stateful
from paceline.checkpoint.state.window import WindowState
from paceline.world import random_streams
from paceline.world.param_groups import parameters_of
from paceline.world.sharded import is_sharded

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
_PLAIN_KINDS = ("schedulers", "loaders", "custom")
KINDS = frozenset({"models", "optimizers", *_PLAIN_KINDS, "scaler", "rng", "window"})


@dataclass
class Encoded:
    """A state that is ready to be written.

    Attributes:
        shared: JSON of state that is the same on all ranks, or divided over them, by owner.
        own: JSON of this rank's random number generators.
        tensors: the tensors, by path.
        pinned: paths of tensors that may differ between ranks; that of the lowest rank is saved.
    """

    shared: dict[str, Any]
    own: dict[str, Any]
    tensors: dict[str, Tensor]
    pinned: list[str]


@dataclass
class Restore:
    """The plan of a load on this rank, before anything is changed.

    Attributes:
        targets: the tensors to read into, by path: new ones, or those of the run.
        modules: for each model its state, with the tensors to read into.
        copies: pairs of a target and a tensor of the run that gets a copy of it: untied here, but tied in the checkpoint.
        mismatches: names that differ from the checkpoint, by owner.
        problems: all other problems.
        notes: sentences about what will not be exactly as it was.
    """

    targets: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, ModuleState] = field(default_factory=dict)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    mismatches: dict[str, Mismatch] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read_into(self, path: str, tensor: Tensor) -> None:
        """Adds a tensor to read into; further tensors for the same path get a copy of the first one."""
        if path in self.targets:
            self.copies.append((self.targets[path], tensor))
        else:
            self.targets[path] = tensor

    def differs(self, owner: str, mismatch: Mismatch) -> None:
        """Records how an owner differs from the checkpoint, if it does."""
        if mismatch:
            self.mismatches[owner] = mismatch


class TrainState:
    """Everything that a run needs to resume.

    Args:
        models: modules by name, with or without DDP and `torch.compile` around them.
        optimizers: torch's optimizers by name, not the wrappers of `prepare`.
        schedulers, loaders, custom: objects by name, each with `state_dict` and `load_state_dict`.
        scaler: the loss scaler, or None.
        run: the counters.
        device: the device whose random number generator belongs to the run.
        tied: for each model, the further names of tied parameters, each with the first name.
        replicas_equal: whether ranks that hold the same parameters have equal values, so that each can write a part of them.
            If not (LocalSGD between two averages), those of rank 0 are saved.
        optimizers_equal: the same for the states of optimizers.
        window: the gradients of an open accumulation window.
        frozen: whether parameters that are not trained are saved; a load expects them only if they were.

    Raises:
        CheckpointError: `checkpoint-stateless`, if an object has no `state_dict` or `load_state_dict`.
    """

    def __init__(
        self,
        *,
        models: Mapping[str, nn.Module] | None = None,
        optimizers: Mapping[str, Optimizer] | None = None,
        schedulers: Mapping[str, Stateful] | None = None,
        loaders: Mapping[str, Stateful] | None = None,
        custom: Mapping[str, Stateful] | None = None,
        scaler: Stateful | None = None,
        run: RunState | None = None,
        device: torch.device | str = "cpu",
        tied: Mapping[str, Mapping[str, str]] | None = None,
        replicas_equal: bool = True,
        optimizers_equal: bool = True,
        window: WindowState | None = None,
        frozen: bool = True,
    ) -> None:
        self.models = dict(models or {})
        self.optimizers = dict(optimizers or {})
        self.plain: dict[str, dict[str, Stateful]] = {
            "schedulers": dict(schedulers or {}),
            "loaders": dict(loaders or {}),
            "custom": dict(custom or {}),
        }
        self.scaler = scaler
        self.run = run or RunState()
        self.device = torch.device(device)
        self.frozen = frozen
        self._only: frozenset[str] | None = None
        self._names: dict[Tensor, str] = {}  # of parameters whose models are left out
        self.tied = dict(tied or {})
        self._replicas_equal = replicas_equal
        self._optimizers_equal = optimizers_equal
        self.window = window
        problems: list[Problem] = []
        for kind, name, item in self._plain_items():
            problem = check_stateful(item, f"{kind}/{name}")
            if problem is not None:
                problems.append(problem)
        if problems:
            raise CheckpointError.of(problems)

    def of_parts(
        self,
        models: Mapping[str, nn.Module],
        tied: Mapping[str, Mapping[str, str]],
        optimizers: Mapping[str, Optimizer],
    ) -> TrainState:
        """Returns a copy with other models and optimizers; see the class."""
        other = copy.copy(self)
        other.models = dict(models)
        other.tied = dict(tied)
        other.optimizers = dict(optimizers)
        return other

    def narrowed(self, kinds: Collection[str]) -> TrainState:
        """Returns a copy that loads only some kinds of state, and leaves the rest of the run as it is.

        Args:
            kinds: some of `KINDS`; kinds that an earlier `narrowed` has left out stay out. `run` is always loaded.
        """
        narrow = copy.copy(self)
        only = frozenset(kinds) if self._only is None else self._only & frozenset(kinds)
        narrow._only = only
        if "models" not in only:
            # The optimizers still need the names that their parameters have in the models.
            for optimizer in self.optimizer_states().values():
                names = {parameter: name for name, parameter in optimizer.parameters.items()}
                narrow._names = narrow._names | names
            narrow.models = {}
        if "optimizers" not in only:
            narrow.optimizers = {}
        narrow.plain = {}
        for kind, items in self.plain.items():
            narrow.plain[kind] = items if kind in only else {}
        if "scaler" not in only:
            narrow.scaler = None
        if "window" not in only:
            narrow.window = None
        return narrow

    def _wanted(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the part of a saved state that is to be loaded."""
        if self._only is None:
            return saved
        wanted = dict(saved)
        for kind in ("models", "optimizers", *_PLAIN_KINDS, "window"):
            if kind not in self._only and kind in wanted:
                wanted[kind] = {}
        if "scaler" not in self._only:
            wanted["scaler"] = None
        return wanted

    def _plain_items(self) -> Iterator[tuple[str, str, Stateful]]:
        """Yields kind, name and object of all schedulers, loaders and registered objects."""
        for kind, items in self.plain.items():
            for name, item in items.items():
                yield kind, name, item

    def optimizer_states(self) -> dict[str, OptimizerState]:
        """Returns each optimizer with the names of its parameters."""
        states = {}
        for name, optimizer in self.optimizers.items():
            names = {**parameter_names(self.models, parameters_of(optimizer), self.tied), **self._names}
            states[name] = OptimizerState.of(optimizer, names)
        return states

    def encode(self, rank: int) -> Encoded:
        """Returns the state of this rank; its tensors share the memory of the run's.

        Raises:
            CheckpointError: `checkpoint-value`, with all values that a checkpoint cannot hold.
        """
        encoder = Encoder()
        shared: dict[str, Any] = {kind: {} for kind in ("models", "optimizers", *_PLAIN_KINDS)}
        # Paths of parameters and of optimizer states, where ranks update them alike. Buffers may differ from rank to rank.
        divisible: set[str] = set()
        for name, module in self.models.items():
            state = ModuleState.of(module)
            left_out: dict[str, bool] = {}
            if not self.frozen:
                left_out = _frozen(module, state)
            for key, tensor in state.tensors.items():
                if key in left_out:
                    continue
                path = encoder.add_tensor(f"models/{name}/{key}", tensor)
                if key not in state.buffers and self._replicas_equal:
                    divisible.add(path)
            values = {key: encoder.encode(value, f"models/{name}/{key}") for key, value in state.values.items()}
            shared["models"][name] = {"aliases": state.aliases, "values": values}
            if left_out:
                shared["models"][name]["left_out"] = left_out
        before_optimizers = set(encoder.tensors)
        for name, optimizer in self.optimizer_states().items():
            shared["optimizers"][name] = optimizer.encode(encoder, f"optimizers/{name}")
        if self._optimizers_equal:
            divisible |= set(encoder.tensors) - before_optimizers
        for kind, name, item in self._plain_items():
            state_json = encoder.encode(item.state_dict(), f"{kind}/{name}")
            shared[kind][name] = {"type": type(item).__qualname__, "state": state_json}
        shared["scaler"] = None
        if self.scaler is not None:
            shared["scaler"] = encoder.encode(self.scaler.state_dict(), "scaler")
        shared["run"] = encoder.encode(self.run.state_dict(), "run")
        own = {str(rank): encoder.encode(random_streams.capture(self.device), f"rng/{rank}")}
        shared["window"] = {}
        if self.window is not None:
            shared["window"] = self.window.encode(encoder, rank)
        if encoder.problems:
            raise CheckpointError.of(encoder.problems)
        pinned = []
        for path, tensor in encoder.tensors.items():
            # Each rank writes its own shard of a DTensor, so DTensors need not be pinned to one rank.
            if path not in divisible and not is_sharded(tensor):
                pinned.append(path)
        return Encoded(shared, own, encoder.tensors, pinned)

    def match(self, saved: Mapping[str, Any], shapes: Shapes, rank: int, *, strict: bool) -> Restore:
        """Compares this state with a saved one, and plans the load. Nothing is changed.

        Args:
            saved: the JSON of a checkpoint.
            shapes: shape and dtype of each of its tensors.
            rank: of this process.
            strict: whether names and owners must be the same.
        """
        restore = Restore()
        saved = self._wanted(saved)
        present: dict[str, Mapping[str, Any]] = {"models": self.models, "optimizers": self.optimizers, **self.plain}
        owners = owner_problems(saved, present)
        if strict:
            restore.problems += owners
        else:
            restore.notes += [problem.what for problem in owners]
        for name in self.models.keys() & saved["models"].keys():
            self._match_model(name, saved["models"][name], shapes, restore)
        for name, optimizer in self.optimizer_states().items():
            if name in saved["optimizers"]:
                _match_optimizer(name, optimizer, saved["optimizers"][name], shapes, restore)
        # Tensors of other owners than models and optimizers are read into new tensors, which their owners then get.
        plain = [saved[kind][name] for kind, name, _ in self._plain_items() if name in saved[kind]]
        plain += [saved["models"][name]["values"] for name in self.models if name in saved["models"]]
        plain += [saved["scaler"], saved["run"]]
        if self._draws:
            plain.append(_streams(saved, rank))
        divided = self._divided(saved)
        for path in references(plain):
            shape, dtype = shapes[path]
            own = divided.get(path)
            # A DTensor of the same global shape is read shard by shard; anything else is read whole on every rank.
            if own is not None and own.shape == shape:
                restore.read_into(path, torch.empty_like(own, dtype=dtype))
            else:
                restore.read_into(path, torch.empty(shape, dtype=dtype))
        if self.window is not None:
            targets, problems = self.window.match(saved.get("window", {}), shapes, rank)
            restore.problems += problems
            for path, target in targets.items():
                restore.read_into(path, target)
        if self._draws and str(rank) not in saved["rng"]:
            restore.notes.append(
                f"random streams: {len(saved['rng'])} ranks saved theirs; higher ranks go on with new ones, "
                "derived from rank 0's"
            )
        if self.scaler is None and saved["scaler"] is not None:
            restore.notes.append("loss scale: the checkpoint has a scaler, this run has no scaler")
        if self.scaler is not None and saved["scaler"] is None:
            restore.notes.append("loss scale: the checkpoint has no scaler, this run has a scaler")
        return restore

    @property
    def _draws(self) -> bool:
        """Whether random streams are loaded."""
        return self._only is None or "rng" in self._only

    def _divided(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the DTensors of registered objects, such as an average of weights, by path: a rank reads only its shards."""
        encoder = Encoder()
        for name, item in self.plain["custom"].items():
            # `state_dict` of an object may be expensive, so it is only called if there are tensors to read.
            if next(references(saved["custom"].get(name)), None) is not None:
                encoder.encode(item.state_dict(), f"custom/{name}")
        return {path: tensor for path, tensor in encoder.tensors.items() if is_sharded(tensor)}

    def _match_model(self, name: str, saved: Mapping[str, Any], shapes: Shapes, restore: Restore) -> None:
        prefix = f"models/{name}/"
        # `apply` needs the same `ModuleState`: a module may return copies of its tensors, which must be loaded after the read.
        state = ModuleState.of(self.models[name])
        restore.modules[name] = state
        saved_names = {path.removeprefix(prefix) for path in shapes if path.startswith(prefix)}
        # Tensors within other values of the module (`get_extra_state`) are read with these values.
        saved_names -= {path.removeprefix(prefix) for path in references(saved["values"])}
        mismatch = Mismatch()
        num_casts = 0
        used: set[str] = set()
        for key, tensor in state.tensors.items():
            # A tensor that was tied when it was saved lies there under the first of its names only.
            source = key if key in saved_names else saved["aliases"].get(key, "")
            if source not in saved_names:
                # A frozen parameter that was left out on purpose keeps its value.
                if key not in saved.get("left_out", ()):
                    mismatch.missing[key] = tuple(tensor.shape)
                continue
            used.add(source)
            shape, dtype = shapes[prefix + source]
            num_casts += dtype != tensor.dtype
            if shape == tensor.shape:
                restore.read_into(prefix + source, tensor)
            else:
                mismatch.misshapen[key] = (tuple(shape), tuple(tensor.shape))
        for key in sorted(saved_names - used - state.aliases.keys()):
            mismatch.unexpected[key] = tuple(shapes[prefix + key][0])
        untied = sorted(saved_names & state.aliases.keys())
        if untied:
            restore.notes.append(f"{name}: {', '.join(untied)} are tied here; the first one's values were taken")
        if num_casts:
            restore.notes.append(f"{name}: {num_casts} tensors were saved in another precision and are cast")
        restore.differs(f"models/{name}", mismatch)

    def sums(self, saved: Mapping[str, Any], shapes: Shapes) -> Iterator[dict[str, Tensor]]:
        """Yields tensors to read one after the other, between `match` and `apply`: gradients that another layout has saved."""
        if self.window is not None:
            yield from self.window.sums(self._wanted(saved).get("window", {}), shapes, self._rescaled(saved))

    def _rescaled(self, saved: Mapping[str, Any]) -> float:
        """Returns the factor for gradients if only the run or only the checkpoint has a loss scaler."""
        if self.scaler is None and saved["scaler"] is not None:
            return 1.0 / float(saved["scaler"]["scale"])
        if self.scaler is not None and saved["scaler"] is None:
            return float(self.scaler.state_dict()["scale"])
        return 1.0

    def apply(self, saved: Mapping[str, Any], restore: Restore, rank: int) -> None:
        """Loads the state of each owner, after the targets were read.

        Args:
            saved: the JSON of the checkpoint.
            restore: the result of `match`.
            rank: of this process.
        """
        tensors = restore.targets
        saved = self._wanted(saved)
        for source, target in restore.copies:
            target.copy_(source)
        for name, state in restore.modules.items():
            values = decode(saved["models"][name]["values"], tensors)
            own_values = {key: value for key, value in values.items() if key in state.values}
            state.put(self.models[name], own_values)
        for name, optimizer in self.optimizer_states().items():
            if name in saved["optimizers"]:
                optimizer.put(saved["optimizers"][name], tensors)
        if self.scaler is not None and saved["scaler"] is not None:
            self.scaler.load_state_dict(decode(saved["scaler"], tensors))
        for kind, name, item in self._plain_items():
            if name in saved[kind]:
                item.load_state_dict(decode(saved[kind][name]["state"], tensors))
        self.run.load_state_dict(decode(saved["run"], tensors))
        if self.window is not None:
            self.window.apply(saved.get("window", {}), tensors, rank, self._rescaled(saved))
        if not self._draws:
            return
        # The generators come last, since the loads before may have drawn random numbers.
        streams = decode(_streams(saved, rank), tensors)
        # A rank that the saved run did not have must not draw the same numbers as rank 0.
        if str(rank) not in saved["rng"]:
            random_streams.derive(streams, rank)
        elif not random_streams.restore(streams, self.device):
            restore.notes.append(f"random streams: saved on {streams['device']}, so {self.device.type}'s is new")


def _frozen(module: nn.Module, state: ModuleState) -> dict[str, bool]:
    """Returns the names of parameters that are not trained, as a dictionary, since `merge` unites dictionaries of ranks."""
    idle = {id(parameter) for parameter in module.parameters() if not parameter.requires_grad}
    # With `keep_vars` the values are the parameters themselves and not detached copies, so that their ids can be compared.
    own = unwrap(module).state_dict(keep_vars=True)
    return {key: True for key in state.tensors if id(own[state.raw[key]]) in idle}


def check_stateful(item: object, name: str) -> Problem | None:
    """Returns the problem with an object that a checkpoint cannot hold, or None."""
    lacking = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(item, method, None))]
    if not lacking:
        return None
    return Problem(
        "checkpoint-stateless",
        f"{name} is a {type(item).__qualname__}, which has no {' and no '.join(lacking)}.",
        why="a checkpoint asks each object for its state, and gives it back",
        fix="add the methods `state_dict()` and `load_state_dict(state)`, or do not register this object",
    )


def merge(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the trees of several ranks: names are united; if values of two ranks differ, that of the lower rank is used."""
    merged: dict[str, Any] = {}
    for tree in trees:
        _merge_into(merged, tree)
    return merged


def _merge_into(merged: MutableMapping[str, Any], tree: Mapping[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            _merge_into(merged[key], value)
        else:
            merged.setdefault(key, value)


def _streams(saved: Mapping[str, Any], rank: int) -> Any:
    """Returns the generator states of a rank; those of rank 0 if the saved run had no such rank."""
    return saved["rng"].get(str(rank), saved["rng"]["0"])


def _match_optimizer(
    name: str, optimizer: OptimizerState, saved: Mapping[str, Any], shapes: Shapes, restore: Restore
) -> None:
    num_groups = len(optimizer.optimizer.param_groups)
    num_saved_groups = len(saved["groups"])
    if num_groups != num_saved_groups:
        restore.problems.append(
            Problem(
                "checkpoint-groups",
                f"optimizer {name!r} has {num_groups} parameter groups, but {num_saved_groups} in the checkpoint.",
                why="hyper-parameters are kept by group",
                fix="build the optimizer with the groups that it had; where it got one later, call `add_param_group` before "
                "`load_state`. To start it anew, load before it is prepared: `load_state(folder, strict=False)`, then "
                "`prepare(optimizer)`",
            )
        )
        return
    members = saved["members"]
    missing = {key: tuple(p.shape) for key, p in optimizer.parameters.items() if key not in members}
    unexpected: dict[str, tuple[int, ...]] = {}
    for key in members:
        if key not in optimizer.groups:
            unexpected[key] = ()  # the shapes of its states say little about the shape of the parameter
    restore.differs(f"optimizers/{name}", Mismatch(missing, unexpected))
    moved = [key for key, group in optimizer.groups.items() if members.get(key, group) != group]
    if moved:
        restore.problems.append(
            Problem(
                "checkpoint-groups",
                f"optimizer {name!r} holds {len(moved)} parameters in another group than the checkpoint.",
                why=f"such as {moved[0]}: group {optimizer.groups[moved[0]]} here, {members[moved[0]]} there",
                fix="build the groups as they were when the checkpoint was saved",
            )
        )
    for path, target in optimizer.targets(saved, shapes).items():
        restore.read_into(path, target)
