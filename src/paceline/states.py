"""`States`: gathers what one run owns into a `TrainState`, and saves and loads it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from paceline.base import env
from paceline.base.errors import CheckpointError
from paceline.base.log import logger
from paceline.checkpoint import retention
from paceline.checkpoint.agree import agreed
from paceline.checkpoint.state.module_state import own_names
from paceline.checkpoint.state.train_state import RunState, TrainState
from paceline.checkpoint.state.window import Gradients, Window
from paceline.checkpoint.store import store_for
from paceline.data.active import ActiveLoaders
from paceline.data.loader import PreparedLoader
from paceline.evaluation_stop import StepEnd
from paceline.optim.accumulate import Accumulation
from paceline.plan.plan import Decision, Plan
from paceline.preemption import Preemption
from paceline.preparation import Preparation, PreparedModel
from paceline.world.collectives import Collectives

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.checkpoint.checkpointer import Checkpointer

_numbers = count()


@dataclass(frozen=True)
class Start:
    """Where a run goes on.

    Attributes:
        epoch: of the loader that trains: the first that is not done; its loader gives what is left of it.
        step: optimizer steps done.
        path: the checkpoint that was loaded; None for a run that begins.
    """

    epoch: int = 0
    step: int = 0
    path: str | None = None


class Hook:
    """A registered hook; `remove()` takes it out again."""

    def __init__(self, hooks: dict[int, Callable[..., None]], hook: Callable[..., None]) -> None:
        self._hooks, self._key = hooks, next(_numbers)
        hooks[self._key] = hook

    def remove(self) -> None:
        """Takes the hook out; a second call does nothing."""
        self._hooks.pop(self._key, None)


class States:
    """Saving and loading of one `Accelerator`.

    Args:
        prepared: what was prepared.
        collectives: the ranks that save together.
        scaler: the loss scaler or None.
        project_dir: where automatic names go, in `checkpoints/`.
        keep: which automatically named checkpoints are kept.
        wanted: the setting `resume`.
        active, gradients: where a batch ends, and a step, a run that was asked to end can leave.

    Attributes:
        run: the run's counters.
        iteration: number of the next automatically named checkpoint.
    """

    def __init__(
        self,
        prepared: Preparation,
        collectives: Collectives,
        scaler: Any,
        project_dir: str | None,
        keep: retention.Keep,
        wanted: Decision,
        active: ActiveLoaders,
        gradients: Accumulation,
    ) -> None:
        self.run = RunState()
        self.iteration = 0
        self._prepared, self._collectives, self._scaler = prepared, collectives, scaler
        self._root = None if project_dir is None else store_for(project_dir).join(project_dir, "checkpoints")
        self._keep, self._wanted, self._active, self._gradients = keep, wanted, active, gradients
        self._preemption: Preemption | None = None
        if wanted.source != "default" and wanted.value != "no":
            prepared.at_first_step = self._refuse_unused
        self._custom: list[Any] = []
        self._hooks: dict[str, dict[int, Callable[..., None]]] = {"save": {}, "load": {}}

    @cached_property
    def _checkpointer(self) -> Checkpointer:
        from paceline.checkpoint.checkpointer import Checkpointer  # takes over a second: not before it is needed

        return Checkpointer(self._collectives, keep=self._keep)

    def register(self, *objects: Any) -> None:
        """Adds objects to what is saved.

        Raises:
            CheckpointError: `checkpoint-stateless`, for each that cannot be saved.
        """
        TrainState(custom={type(item).__name__: item for item in objects})
        self._custom.extend(objects)

    def clear(self) -> None:
        """Forgets registered objects."""
        self._custom.clear()

    def add_hook(self, kind: str, hook: Callable[..., None]) -> Hook:
        """Calls `hook` before each save or load."""
        return Hook(self._hooks[kind], hook)

    def on_main(self, work: Callable[[], None]) -> None:
        """Runs `work` on rank 0; where it fails, every rank raises the same error. Ranks: all."""
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
        plan: Plan,
        *,
        background: bool = False,
        busy: str = "wait",
        metrics: Mapping[str, float] | None = None,
        frozen: bool = True,
    ) -> str | None:
        """Saves at `path`, or under the next automatic name; None where it is skipped. Ranks: all."""
        if busy not in ("wait", "skip"):
            raise CheckpointError(
                "checkpoint-busy",
                f"a save cannot {busy!r} while another one is under way.",
                fix='say busy="wait" or busy="skip"',
            )
        if busy == "skip" and self._checkpointer.busy():
            return None
        self._checkpointer.wait()
        target = path or self._checkpointer.next_path(self._automatic(), self.iteration)
        state, hooks = self._state(), list(self._hooks["save"].values())
        state.frozen = frozen

        def call_hooks(folder: str) -> None:
            models = [each.module for each in self._prepared.models]
            weights = [model.state_dict() for model in models]
            for hook in hooks:
                hook(models, weights, folder)
            _keep(state, len(weights))

        saved = self._checkpointer.save(
            target,
            state,
            plan_json=plan.to_json(),
            extra_files_hook=call_hooks if hooks else None,
            metrics=metrics,
            background=background,
        )
        if path is None:
            self.iteration = int(saved.rsplit("_", 1)[1]) + 1
        return saved

    def wait(self) -> None:
        """Returns once no save is under way; raises what the last one raised. Ranks: all."""
        if "_checkpointer" in self.__dict__:
            self._checkpointer.wait()

    def resume(self) -> Start:
        """Loads what the setting `resume` says; from here on SIGTERM and Ctrl-C save and leave. Ranks: all."""
        self._prepared.at_first_step = None
        source = self._source()
        if source is not None:
            self.load(source)
        self._listen()
        epoch = next((each.position.epoch for each in self._loaders() if each.trains), None)
        if epoch is None:
            epoch = next((each.position.epoch for each in self._loaders()), 0)
        start = Start(epoch, self.run.step, source)
        if source is not None and self._collectives.world.is_main:
            logger("states").warning(
                "goes on from %s: epoch %d, step %d; to begin anew, say `--resume no`.", source, start.epoch, start.step
            )
        return start

    def _source(self) -> str | None:
        """The checkpoint that the setting means."""
        wanted = self._wanted
        if self._root is None and (wanted.value == "no" or wanted.source == "default"):
            return None
        if wanted.value == "auto":
            return self._checkpointer.latest(self._automatic())
        chosen, run = None if wanted.value == "no" else str(wanted.value), env.get("PACELINE_RUN")
        if run and self._root is not None:  # started again, it goes on from what it saved itself
            return self._checkpointer.latest(self._root, run) or chosen
        if chosen is None:
            return None
        # Hosts that came later count fewer restarts: one that has seen any speaks for all.
        (restarts,) = self._collectives.sum_ints([env.get("TORCHELASTIC_RESTART_COUNT")])
        newest = self._checkpointer.latest(self._root) if restarts and self._root is not None else None
        return newest or chosen

    def _loaders(self) -> list[PreparedLoader]:
        return [each for each in self._prepared.loaders if isinstance(each, PreparedLoader)]

    def _listen(self) -> None:
        """Has SIGTERM and Ctrl-C end the run after a step, where there are steps and a place to save."""
        prepared = self._prepared
        if self._preemption is not None or self._root is None or not prepared.optimizers:
            return
        self._preemption = Preemption(
            prepared.optimizers, self._gradients, self._collectives, prepared.device,
            self._save_and_leave, StepEnd(prepared, self._active),
        )  # fmt: skip
        self._active.between = self._preemption.between
        self._active.in_evaluation = self._preemption.in_evaluation
        self._active.epoch_over = self._preemption.epoch_over

    def _save_and_leave(self) -> str | None:
        """The last save of a run that was asked to end: neither an earlier one that failed nor a metric that nobody has
        measured keeps it from being made."""
        try:
            self.wait()
        except CheckpointError as error:  # told here: no call will come that could raise it
            if self._collectives.world.is_main:
                logger("states").error("the save before the last, in the background, has failed: %s", error)
        return self.save(None, self._prepared.plan, metrics=self._keep.unknown)

    def end(self) -> None:
        """Waits for a save that is under way; SIGTERM and Ctrl-C mean again what they meant before. Ranks: all."""
        if self._preemption is not None:
            self._preemption.end()
            self._active.between = self._active.in_evaluation = self._active.epoch_over = None
        self.wait()

    def _refuse_unused(self) -> None:
        wanted = self._wanted
        raise CheckpointError(
            "resume-unused",
            "the run was told to go on from a checkpoint, but begins to train without loading any.",
            why=f"resume = {wanted.value} ({wanted.where}), and the script called neither `resume` nor `load_state` "
            "before its first optimizer step",
            fix="add `start = accelerator.resume()` after `prepare`, and begin at `start.epoch`; or leave resume out",
        )

    def load(self, path: str | None, strict: bool = True, only: Collection[str] | None = None) -> None:
        """Loads from `path`, or the newest automatically named checkpoint that verifies; `only` some kinds. Ranks: all."""
        self._prepared.at_first_step = None
        self.wait()
        source = path or self._checkpointer.latest(self._automatic())
        if source is None:
            raise CheckpointError(
                "checkpoint-missing",
                f"there is no checkpoint in {self._root} that verifies.",
                why="load_state() without a folder takes the newest automatically named one; the log names damaged ones",
                fix="save one with `save_state()`, or name the folder",
            )
        state, models = self._state(), [each.module for each in self._prepared.models]
        hooks = list(self._hooks["load"].values())

        def call_hooks() -> None:
            for hook in hooks:
                hook(models, source)

        if hooks:
            agreed(self._collectives, "running the hooks before a load", call_hooks)
        _keep(state, len(models))
        if only is not None:
            state = state.narrowed(only)
        self._checkpointer.load(source, state, strict=strict)
        for optimizer in self._prepared.optimizers:
            optimizer.restart(self.run.step)
        if path is None:
            # None: a checkpoint that the script has named may lie there too.
            number = retention.number(store_for(source), source)
            self.iteration = 0 if number is None else number + 1

    def _automatic(self) -> str:
        if self._root is None:
            raise CheckpointError(
                "checkpoint-unnamed",
                "no folder was named, and there is none for automatic names.",
                why="project_dir=None",
                fix="name a folder, or construct `Accelerator(project_dir='runs/mine')`",
            )
        return self._root

    def _state(self) -> TrainState:
        prepared = self._prepared
        self.run.micro_step = self._gradients.done
        self.run.step = max((each.steps for each in prepared.optimizers), default=self.run.step)
        return TrainState(
            models=_numbered("model", [each.wrapped for each in prepared.models]),
            optimizers=_numbered("optimizer", [each.optimizer for each in prepared.optimizers]),
            schedulers=_numbered("scheduler", [each.scheduler for each in prepared.schedulers]),
            loaders=_numbered("loader", prepared.loaders),
            custom=_numbered("object", self._custom),
            scaler=self._scaler,
            run=self.run,
            device=prepared.device,
            tied=_numbered("model", [each.tied for each in prepared.models]),
            replicas_equal=not self._gradients.apart,
            window=self._window(),
        )

    def _window(self) -> Window:
        prepared, world = self._prepared, self._collectives.world
        owners = {p: each for each in prepared.optimizers for group in each.param_groups for p in group["params"]}

        def stale(parameter: Tensor) -> bool:
            return parameter in owners and owners[parameter].stale

        def gradients(each: PreparedModel) -> Gradients:
            plan = each.chain.plan
            return Gradients(
                parameters=lambda: own_names(each.module, each.tied),
                held=lambda: each.chain.held(each.wrapped),
                take=lambda held: each.chain.take(each.wrapped, held),
                layout=f"{plan.layout}, zero={plan.zero}, {', '.join(plan.strategies)}, {plan.options}",
                ranks=world.size // plan.layout.pp,
                stale=stale,
            )

        layout = prepared.plan.layout
        models = _numbered("model", [gradients(each) for each in prepared.models])
        return Window(models, self._gradients, layout.data_index(world.rank), layout.width, self._gradients.apart)


def _numbered(kind: str, items: list[Any]) -> dict[str, Any]:
    """Names that do not change when the same script runs again: model, model_1, model_2, ..."""
    return {kind if number == 0 else f"{kind}_{number}": item for number, item in enumerate(items)}


def _keep(state: TrainState, count: int) -> None:
    """Leaves models to the hooks that took them: a hook that saves or loads a model itself pops it from its list."""
    for name in list(state.models)[count:]:
        del state.models[name]
