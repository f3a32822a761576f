"""`States`: gathers what one run owns into a `TrainState`, and saves and loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.base.errors import CheckpointError
from paceline.checkpoint.retention import Keep
from paceline.checkpoint.state import RunState, TrainState
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Plan
from paceline.preparation import Preparation
from paceline.world.collectives import Collectives

if TYPE_CHECKING:
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
        keep: Keep,
    ) -> None:
        self.run = RunState()
        self.iteration = 0
        self._prepared, self._collectives, self._scaler = prepared, collectives, scaler
        self._root = None if project_dir is None else str(Path(project_dir) / "checkpoints")
        self._keep = keep
        self._custom: list[Any] = []
        self._hooks: dict[str, dict[int, Callable[..., None]]] = {"save": {}, "load": {}}

    @cached_property
    def _checkpointer(self) -> Checkpointer:
        from paceline.checkpoint.checkpointer import Checkpointer  # takes over a second: not before it is needed

        return Checkpointer(self._collectives, keep_last=self._keep.last)

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
    ) -> str | None:
        """Saves at `path`, or under the next automatic name. Ranks: all."""
        target = path or self._checkpointer.next_path(self._automatic(), self.iteration)
        state, hooks = self._state(), list(self._hooks["save"].values())

        def call_hooks(folder: str) -> None:
            models = [each.module for each in self._prepared.models]
            weights = [model.state_dict() for model in models]
            for hook in hooks:
                hook(models, weights, folder)
            _keep(state, len(weights))

        saved = self._checkpointer.save(
            target, state, plan_json=plan.to_json(), extra_files_hook=call_hooks if hooks else None
        )
        if path is None:
            self.iteration = int(saved.rsplit("_", 1)[1]) + 1
        return saved

    def wait(self) -> None:
        """Returns once no save is under way. Ranks: all."""

    def resume(self) -> Start:
        """Loads what the setting `resume` says. Ranks: all."""
        raise NotImplementedError

    def load(self, path: str | None, strict: bool = True) -> None:
        """Loads from `path`, or the newest automatically named checkpoint that verifies. Ranks: all."""
        source = path or self._checkpointer.latest(self._automatic())
        if source is None:
            raise CheckpointError(
                "checkpoint-missing",
                f"there is no checkpoint in {self._root}.",
                why="load_state() without a folder takes the newest automatically named one",
                fix="save one with `save_state()`, or name the folder",
            )
        state, models = self._state(), [each.module for each in self._prepared.models]
        for hook in list(self._hooks["load"].values()):
            hook(models, source)
        _keep(state, len(models))
        self._checkpointer.load(source, state, strict=strict)
        for optimizer in self._prepared.optimizers:
            optimizer.steps = self.run.step
        if path is None:
            self.iteration = int(source.rsplit("_", 1)[1]) + 1

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
            tied=_numbered("model", [_other_names(each.facts) for each in prepared.models]),
        )


def _other_names(facts: ModelFacts) -> dict[str, str]:
    """The other names of tied parameters -> the first."""
    return {other: names[0] for names in facts.tied for other in names[1:]}


def _numbered(kind: str, items: list[Any]) -> dict[str, Any]:
    """Names that do not change when the same script runs again: model, model_1, model_2, ..."""
    return {kind if number == 0 else f"{kind}_{number}": item for number, item in enumerate(items)}


def _keep(state: TrainState, count: int) -> None:
    """Leaves models to the hooks that took them: a hook that saves or loads a model itself pops it from its list."""
    for name in list(state.models)[count:]:
        del state.models[name]
