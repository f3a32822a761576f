"""`States`: collects the state of one run in a `TrainState`, and saves and loads it.

    save      hooks of the script -> checkpointer, perhaps in the background -> the number of the next automatic name
    load      hooks of the script -> checkpointer -> parts that are stored beside the counters
    resume    the checkpoint that the setting names -> load -> from now on SIGTERM and Ctrl-C save and exit

Files and formats are the business of `checkpoint/`. Here is what belongs to a checkpoint, and which one is loaded. Every run
has its `States`, and many never save: so `checkpoint/` is loaded by the methods that use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.base import env
from paceline.base.errors import CheckpointError
from paceline.base.log import logger
from paceline.checkpoint.keep import Keep
from paceline.checkpoint.state.module_state import own_names
from paceline.checkpoint.state.run_state import RunState, Stateful
from paceline.data.loader import PreparedLoader
from paceline.optim.optimizer import PreparedOptimizer
from paceline.plan.data import Position
from paceline.run.prepared import PreparedModel
from paceline.run.run import Run
from paceline.world.param_groups import parameters_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from paceline.checkpoint.checkpointer import Checkpointer
    from paceline.checkpoint.format.checkpoint_format import FolderReader, FolderWriter
    from paceline.checkpoint.state.train_state import TrainState
    from paceline.checkpoint.state.window import WindowState
    from paceline.run.preemption import Preemption

T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """Where a run continues.

    Attributes:
        epoch: the first unfinished epoch of the loader that trains; the loader yields the rest of it.
        step: the number of optimizer steps that were taken.
        path: the checkpoint that was loaded; None for a new run.
    """

    epoch: int = 0
    step: int = 0
    path: str | None = None


@dataclass(frozen=True)
class Latest:
    """A checkpoint that this run has saved or loaded.

    Attributes:
        path: its folder.
        step: the number of optimizer steps in it.
        positions: the positions of the loaders that train, by name.
    """

    path: str
    step: int
    positions: Mapping[str, Position]


class States:
    """Saving and loading of one `Accelerator`.

    Args:
        run: the run.
        keep: which automatically named checkpoints are kept.

    Attributes:
        writes: whether files are written; not in a rehearsal.
        counters: the counters of the run.
        latest: the checkpoint that this run has saved or loaded last, or None.
        iteration: the number of the next automatically named checkpoint.
    """

    writes = True

    def __init__(self, run: Run, keep: Keep) -> None:
        self.counters = RunState()
        self.iteration = 0
        self.latest: Latest | None = None
        self._beside: dict[str, Stateful] = {}
        self._run = run
        self._prepared = run.prepared
        self._collectives = run.collectives
        self._keep = keep
        self._root: str | None = None
        if run.project_dir is not None:
            from paceline.checkpoint.store import store_for

            self._root = store_for(run.project_dir).join(run.project_dir, "checkpoints")
        self._wanted = next(decision for decision in run.decisions if decision.field == "resume")
        self._preemption: Preemption | None = None
        self._custom: list[Stateful] = []
        self._hooks: dict[str, OrderedDict[int, Callable[..., None]]] = {"save": OrderedDict(), "load": OrderedDict()}
        self._must_load: Callable[[], None] | None = None
        self._resumed = False
        if self._wanted.source != "default" and self._wanted.value != "no":
            self._must_load = run.events.before_first_step.subscribe(self._refuse_unused)
        run.lifetime.subscribe(self.end)

    @classmethod
    def of(cls, run: Run, keep: Keep) -> States:
        """Returns the states of a run; they write nothing in a rehearsal or a trial."""
        return States(run, keep) if run.runtime.keeps_files else UnkeptStates(run, keep)

    @cached_property
    def _checkpointer(self) -> Checkpointer:
        from paceline.checkpoint.checkpointer import Checkpointer  # takes over a second: not before it is needed

        return Checkpointer(self._collectives, keep=self._keep, tell=self._run.events.saved)

    def register(self, *objects: Stateful) -> None:
        """Adds objects to the checkpoints.

        Raises:
            CheckpointError: `checkpoint-stateless`, with all objects that cannot be saved.
        """
        from paceline.checkpoint.state.train_state import TrainState

        # Its constructor raises the error. The objects are added only if all of them can be saved.
        TrainState(custom={type(item).__name__: item for item in objects})
        self._custom.extend(objects)

    def save_beside(self, name: str, part: Stateful) -> None:
        """Adds the state of a part of the run to the checkpoints, next to the counters.

        The state must consist of plain values that are the same on all ranks. Unlike a registered object, it may be missing
        in a checkpoint that is loaded, or in the run that loads it.
        """
        self._beside[name] = part

    def clear(self) -> None:
        """Forgets registered objects."""
        self._custom.clear()

    def add_hook(self, kind: str, hook: Callable[..., None]) -> RemovableHandle:
        """Registers a hook that is called before each "save" or "load"."""
        handle = RemovableHandle(self._hooks[kind])
        self._hooks[kind][handle.id] = hook
        return handle

    def hooks_by_number(self, kind: str) -> dict[int, Callable[..., None]]:
        """Returns the registered hooks by the `id` of their handles; a change of this dictionary takes effect."""
        return self._hooks[kind]

    def hooks(self, kind: str) -> list[Callable[..., None]]:
        """Returns the hooks that are called before each save or load."""
        return list(self._hooks[kind].values())

    def on_main(self, work: Callable[[], None]) -> None:
        """Runs `work` on rank 0; if it fails, every rank raises the same error. Ranks: all."""
        error: Exception | None = None
        if self._collectives.world.is_main:
            try:
                work()
            except Exception as caught:  # it is raised again below, on every rank
                error = caught
        error = self._collectives.broadcast_object(error)
        if error is not None:
            raise error

    def save(
        self,
        path: str | None,
        *,
        background: bool = False,
        busy: str = "wait",
        metrics: Mapping[str, float] | None = None,
        frozen: bool = True,
        check: Callable[[], None] = lambda: None,
        fresh: bool = False,
        writer: FolderWriter | None = None,
        keep: Keep | None = None,
        alone: bool = False,
    ) -> str | None:
        """Saves at `path`, or under the next automatic name. Returns the folder; None if it was skipped. Ranks: all.

        Arguments are those of `Accelerator.save_state`; `frozen=False` leaves out parameters that are not trained, and `check`
        may raise before anything is collected. The others are those of `Checkpointer.save`. A `writer` calls hooks itself.
        """
        if busy not in ("wait", "skip"):
            raise CheckpointError(
                "checkpoint-busy",
                f"a save cannot {busy!r} while another one is running.",
                fix='write busy="wait" or busy="skip"',
            )
        if busy == "skip" and self._checkpointer.busy():
            return None
        # One save at a time. A save in the background ends first, and if it failed, its error is raised here.
        with self._run.events.phase["checkpoint"]:
            self._checkpointer.wait()
        check()
        target = path or self._checkpointer.next_path(self._automatic(), self.iteration)
        state = self._state(frozen)
        hooks = self.hooks("save")

        def call_hooks(folder: str) -> None:
            # A hook that saves a model itself takes its weights out of the list.
            models = [entry.module for entry in self._prepared.models]
            weights = [model.state_dict() for model in models]
            for hook in hooks:
                hook(models, weights, folder)
            _leave_out_popped(state, len(weights))

        with self._run.events.phase["checkpoint"]:
            saved = self._checkpointer.save(
                target,
                state,
                plan_json=self._run.plan.to_json(),
                extra_files_hook=call_hooks if hooks and writer is None else None,
                metrics=metrics,
                background=background,
                fresh=fresh or path is None,
                writer=writer,
                keep=keep,
                alone=alone,
            )
        # Automatic names are `checkpoint_0`, `checkpoint_1`, ... A number that exists already was left out.
        if path is None:
            self.iteration = int(saved.rsplit("_", 1)[1]) + 1
        if writer is None:
            self.latest = Latest(saved, self.counters.step, self._positions())
        return saved

    def go_on_from(self, path: str) -> None:
        """Counts what the run of a checkpoint has saved beside it as this run's own; see `Ownership`."""
        self._checkpointer.go_on_from(path)

    def save_object(self, obj: object, path: str, safe_serialization: bool) -> None:
        """Saves an object on the main process; see `Accelerator.save`."""
        if self.writes and self._collectives.world.is_main:
            from paceline.checkpoint.files import save_object

            save_object(obj, path, safe_serialization)

    def save_model(
        self,
        model: nn.Module,
        module: nn.Module,
        directory: str | Path,
        max_shard_size: str | int,
        safe_serialization: bool,
    ) -> None:
        """Saves the weights of a model; see `Accelerator.save_model`. Ranks: all.

        Args:
            model: the prepared model.
            module: the user's module inside of it.
        """
        if not self.writes:
            return
        from paceline.checkpoint.weights.model import save_model  # takes half a second: not before it is needed

        order, tied = self._prepared.names_of(model)
        peers = self._collectives
        save_model(module, directory, max_shard_size, safe_serialization, peers=peers, order=order, tied=tied)

    def load_model(self, model: nn.Module, module: nn.Module, directory: str | Path, strict: bool) -> None:
        """Loads weights into a model, which is given as in `save_model`; see `Accelerator.load_model`. Ranks: all."""
        from paceline.checkpoint.weights.model import load_model

        _, tied = self._prepared.names_of(model)
        load_model(module, directory, strict=strict, peers=self._collectives, tied=tied)

    def wait(self) -> None:
        """Waits for a save in the background, and raises its error if it failed. Ranks: all."""
        # The cached property is in `__dict__` once it was used. Without it nothing was saved, and it is not imported either.
        if "_checkpointer" in self.__dict__:
            self._checkpointer.wait()

    @property
    def goes_on(self) -> bool:
        """Whether the run continues from a checkpoint: `resume` has loaded one, or the setting `resume` asks for one."""
        wanted = self._wanted
        return self._resumed or (wanted.source != "default" and wanted.value != "no")

    def resume(self) -> Start:
        """Loads the checkpoint that the setting `resume` names. From now on SIGTERM and Ctrl-C save and exit. Ranks: all."""
        self._need_not_load()
        source = self._source()
        if source is not None:
            self.load(source)
            self._resumed = True
        self._listen()
        loaders = self._prepared.loaders
        # The epoch is that of the loader that trains. In a new run no loader has trained yet, so the first one is used.
        counting = [loader for loader in loaders if loader.trains] or loaders
        epoch = counting[0].position.epoch if counting else 0
        start = Start(epoch, self.counters.step, source)
        if source is not None and self._collectives.world.is_main:
            logger("states").warning(
                "resumed from %s: epoch %d, step %d; use `--resume no` to start a new run.",
                source,
                start.epoch,
                start.step,
            )
        return start

    def _source(self) -> str | None:
        """Returns the checkpoint that the setting `resume` names, or None. Ranks: all."""
        wanted = self._wanted
        if self._root is None and (wanted.value == "no" or wanted.source == "default"):
            return None
        if wanted.value == "auto":
            return self._checkpointer.latest(self._automatic())
        # The user has named a checkpoint, or "no". But if the launcher has restarted this run, it continues from what it has
        # saved since then. The launcher's name of the run tells its checkpoints from those of other runs in the same folder.
        chosen = None if wanted.value == "no" else str(wanted.value)
        run = env.get("PACELINE_RUN")
        if run and self._root is not None:
            return self._checkpointer.latest(self._root, run) or chosen
        if chosen is None:
            return None
        # A host that has joined later counts fewer restarts. If any host counts one, the run was restarted.
        (restarts,) = self._collectives.sum_ints([env.get("TORCHELASTIC_RESTART_COUNT")])
        if restarts and self._root is not None:
            return self._checkpointer.latest(self._root) or chosen
        return chosen

    def _listen(self) -> None:
        """Makes SIGTERM and Ctrl-C end the run after a step, if the run has optimizers and a folder for checkpoints."""
        if self._preemption is None and self._root is not None and self._prepared.optimizers:
            from paceline.run.preemption import Preemption

            self._preemption = Preemption(self._run, self._save_and_leave)

    def _save_and_leave(self) -> str | None:
        """Makes the last save of a run that was asked to end.

        An earlier save that failed must not prevent it, nor a metric for `Keep(best=...)` that was not measured yet.
        """
        try:
            self.wait()
        except CheckpointError as error:  # it is logged, since no later call could raise it
            if self._collectives.world.is_main:
                logger("states").error("the previous save, in the background, failed: %s", error)
        return self.save(None, metrics=self._keep.unknown)

    def end(self) -> None:
        """Waits for a save in the background, and restores the handlers of SIGTERM and Ctrl-C. Ranks: all."""
        if self._preemption is not None:
            self._preemption.end()
        self.wait()

    def _need_not_load(self) -> None:
        """Allows training to begin without an error `resume-unused`: the script has loaded, or asked for, a checkpoint."""
        if self._must_load is not None:
            self._must_load()

    def _refuse_unused(self) -> None:
        wanted = self._wanted
        raise CheckpointError(
            "resume-unused",
            "the run was to resume from a checkpoint, but the script trains without loading one.",
            why=f"resume = {wanted.value} ({wanted.where}), and the script called neither `resume` nor `load_state` "
            "before its first optimizer step",
            fix="add `start = accelerator.resume()` after `prepare`, and begin at `start.epoch`; or remove the setting resume",
        )

    def load(
        self,
        path: str | None,
        strict: bool = True,
        only: Collection[str] | None = None,
        *,
        reader: FolderReader | None = None,
        alone: bool = False,
    ) -> None:
        """Loads a checkpoint. Ranks: all.

        Args:
            path: the checkpoint; None loads the newest automatically named one that is undamaged.
            strict: whether names must be the same.
            only: kinds of state to load, see `train_state.KINDS`; None loads all.
            reader, alone: those of `Checkpointer.load`. Who has a `reader` has called the hooks.
        """
        self._need_not_load()
        self.wait()
        source = path or self._checkpointer.latest(self._automatic())
        if source is None:
            raise CheckpointError(
                "checkpoint-missing",
                f"there is no undamaged checkpoint in {self._root}.",
                why="load_state() without a folder loads the newest automatically named one; damaged ones are in the log",
                fix="save one with `save_state()`, or pass the folder of a checkpoint",
            )
        state = self._state()
        models = [entry.module for entry in self._prepared.models]
        hooks = [] if reader else self.hooks("load")

        def call_hooks() -> None:
            # A hook that loads a model itself takes it out of the list.
            for hook in hooks:
                hook(models, source)

        if hooks:
            from paceline.checkpoint.agree import agreed

            agreed(self._collectives, "running the hooks before a load", call_hooks)
        _leave_out_popped(state, len(models))
        if only is not None:
            state = state.narrowed(only)
        self._checkpointer.load(source, state, strict=strict, reader=reader, alone=alone)
        # The counters are loaded with the state. Each optimizer counts on from the step of the checkpoint.
        for optimizer in self._prepared.optimizers:
            optimizer.restart(self.counters.step)
        for name, part in self._beside.items():
            if name in self.counters.extra:
                part.load_state_dict(self.counters.extra[name])
        # A rollback, which leaves out some kinds of state, goes back to the checkpoint that is the latest already.
        if only is None and reader is None:
            self.latest = Latest(source, self.counters.step, self._positions())
        if path is None:
            from paceline.checkpoint import retention
            from paceline.checkpoint.store import store_for

            # The number is None for a checkpoint that the script has saved there under another name.
            number = retention.number(store_for(source), source)
            self.iteration = 0 if number is None else number + 1

    def training_loaders(self) -> dict[str, PreparedLoader]:
        """Returns the loaders that train, by the names that they have in a checkpoint."""
        loaders = _numbered("loader", self._prepared.loaders)
        return {name: loader for name, loader in loaders.items() if loader.trains}

    def _positions(self) -> dict[str, Position]:
        return {name: loader.position for name, loader in self.training_loaders().items()}

    def _automatic(self) -> str:
        if self._root is None:
            raise CheckpointError(
                "checkpoint-unnamed",
                "no folder was given, and there is none for automatically named checkpoints.",
                why="project_dir=None",
                fix="pass a folder, or construct `Accelerator(project_dir='runs/mine')`",
            )
        return self._root

    def _state(self, frozen: bool = True) -> TrainState:
        """Returns all that belongs to a checkpoint. It refers to the live objects, so that a load changes these."""
        from paceline.checkpoint.state.train_state import TrainState

        prepared = self._prepared
        self._update_counters()
        # The user's own optimizers and schedulers, without our wrappers: these have no state of their own to save.
        optimizers = _numbered("optimizer", [entry.optimizer for entry in prepared.optimizers])
        schedulers = _numbered("scheduler", [entry.scheduler for entry in prepared.schedulers])
        inner_optimizers: list[Optimizer] = []
        for entry in prepared.optimizers:
            for inner in entry.stepped_through:
                # A wrapper around one optimizer, such as Lookahead, often has the state of that one for its own.
                if inner.state is not entry.optimizer.state:
                    inner_optimizers.append(inner)
        return TrainState(
            models=_numbered("model", [entry.wrapped for entry in prepared.models]),
            optimizers=optimizers | _numbered("inner_optimizer", inner_optimizers),
            schedulers=schedulers,
            loaders=_numbered("loader", prepared.loaders),
            custom=_numbered("object", self._custom),
            scaler=self._run.scaler,
            run=self.counters,
            device=self._run.device,
            tied=_numbered("model", [entry.tied for entry in prepared.models]),
            replicas_equal=self._run.gradients.replicas_equal,
            optimizers_equal=self._run.gradients.optimizers_equal,
            window=self._window(),
            frozen=frozen,
        )

    def _update_counters(self) -> None:
        """Counts the steps up to now, and takes the states of the parts that are saved beside the user's objects."""
        step = max((optimizer.steps for optimizer in self._prepared.optimizers), default=self.counters.step)
        extra = self.counters.extra | {name: part.state_dict() for name, part in self._beside.items()}
        self.counters = replace(self.counters, step=step, micro_step=self._run.gradients.done, extra=extra)

    def _window(self) -> WindowState:
        """Returns the gradients that were not stepped yet, and the state of their window."""
        from paceline.checkpoint.state.window import WindowGradients, WindowState

        run = self._run
        optimizer_of: dict[Tensor, PreparedOptimizer] = {}
        for optimizer in self._prepared.optimizers:
            optimizer_of.update(dict.fromkeys(parameters_of(optimizer), optimizer))

        def stale(parameter: Tensor) -> bool:
            # A window may have several optimizers. Gradients that one of them has stepped already are not pending.
            return parameter in optimizer_of and optimizer_of[parameter].stale

        def gradients(entry: PreparedModel) -> WindowGradients:
            plan = entry.chain.plan
            # Ranks along `pp` hold different parameters, so their gradients are not parts of the same one.
            ranks = run.world.size
            if entry.chain.owners is not None:
                ranks //= entry.chain.owners.size
            # Pending gradients can be restored only under the layout that they were saved under, which `layout` names.
            return WindowGradients(
                parameters=lambda: own_names(entry.module, entry.tied),
                pending=entry.chain.pending_gradients,
                restore_pending=entry.chain.restore_pending,
                layout=f"{plan.layout}, zero={plan.zero}, {', '.join(plan.strategies)}, {plan.options}",
                ranks=ranks,
                stale=stale,
            )

        layout = run.plan.layout
        models = _numbered("model", [gradients(entry) for entry in self._prepared.models])
        apart = not run.gradients.replicas_equal
        return WindowState(models, run.gradients, layout.data_index(run.world.rank), layout.width, apart=apart)


class UnkeptStates(States):
    """The states of a rehearsal or a trial: nothing is written or loaded, and the run never resumes."""

    writes = False

    def save(self, path: str | None, **options: object) -> str:
        """Returns a path without saving."""
        return path or "checkpoint"

    def load(
        self, path: str | None, strict: bool = True, only: Collection[str] | None = None, **others: object
    ) -> None:
        """Does nothing."""

    def on_main(self, work: Callable[[], None]) -> None:
        """Does nothing, since `work` would write files."""

    def wait(self) -> None:
        """Does nothing, since there is no save to wait for."""

    def _source(self) -> None:
        return None

    def _listen(self) -> None:
        """Does nothing: SIGTERM and Ctrl-C end the process, as there is nothing to save."""


def _numbered(kind: str, items: Sequence[T]) -> dict[str, T]:
    """Gives items names that are the same whenever the same script runs: model, model_1, model_2, ..."""
    return {f"{kind}_{number}" if number else kind: item for number, item in enumerate(items)}


def _leave_out_popped(state: TrainState, count: int) -> None:
    """Removes models that hooks have popped from their list, because they save or load these models themselves."""
    for name in list(state.models)[count:]:
        del state.models[name]
