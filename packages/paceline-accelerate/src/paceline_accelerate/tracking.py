"""`accelerate.tracking`: its tracker classes over Paceline's, trackers that scripts write, and a run's list of both.

    log_with="wandb"     -> WandBTracker("project", **init_kwargs["wandb"])  -> paceline_lens.trackers.wandb
    log_with=MyTracker() -> the script's own, which inherits `GeneralTracker`

accelerate names the project when a run starts and hands the settings over afterwards, while Paceline's trackers take both at
once. Its classes therefore begin a run in `start`, and store the settings in `store_init_configuration`.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from pathlib import Path
from typing import Any, ClassVar, cast

from paceline.base.errors import CompatError, Problem, TrackerError
from paceline.base.log import warn_once
from paceline.observe.trackers.group import Trackers, missing_modules
from paceline.observe.trackers.tracker import TRACKERS
from paceline_accelerate.errors import TrackerChoiceError
from paceline_accelerate.kinds import LoggerType, text_of
from paceline_accelerate.state import PartialState


class GeneralTracker:
    """The base class of trackers that scripts write; a subclass defines `name`, `tracker` and the methods below.

    Attributes:
        main_process_only: whether it is used on the main process alone; `on_main_process` guards a method accordingly.
        requires_logging_directory: whether it is constructed with a folder.
    """

    main_process_only = True
    requires_logging_directory: bool
    name: str
    tracker: Any

    def __init__(self, _blank: bool = False) -> None:
        # `dir` and not `hasattr`, which would run the property that `tracker` usually is, before the run has begun.
        required = ("name", "requires_logging_directory", "tracker")
        missing = [name for name in required if name not in dir(self)]
        if missing and not _blank:
            raise CompatError(
                "compat-argument",
                f"{type(self).__name__} is missing the required attributes {', '.join(f'`{name}`' for name in missing)}.",
                why="a tracker is made and named by them",
                fix="define them in the class; `tracker` may be a property that gives what the tracker wraps",
            )

    def start(self) -> None:
        """Begins the run."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Stores the run's settings."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs values."""

    def finish(self) -> None:
        """Ends the run."""


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a tracker's method to do nothing on other processes than the main one if `main_process_only` is set."""

    @functools.wraps(function)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return guarded


def _passed_on(name: str) -> Callable[..., None]:
    """Makes a method that calls the method of this name of `paceline_tracker`."""

    @on_main_process
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        getattr(self.paceline_tracker, name)(*args, **kwargs)

    method.__name__ = name
    method.__doc__ = f"What `{name}` of our tracker does."
    return method


class _ClientTracker(GeneralTracker):
    """The base class of accelerate's tracker classes, each of which stands before a tracker of Paceline's.

    Args:
        run_name: name of the run or the project.
        kwargs: arguments for the library's call that begins a run.

    Attributes:
        paceline_tracker: Paceline's tracker, which does the work.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        self._stand_for(run_name, kwargs)

    def _stand_for(self, run_name: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = options
        # The folder is where values wait for MLflow's server; the others write none of their own.
        self.paceline_tracker = TRACKERS.get(str(self.name))("runs", **options)

    @property
    def tracker(self) -> Any:
        """The library's own object."""
        return self.paceline_tracker.native

    @on_main_process
    def start(self) -> None:
        """Begins the run."""
        self.paceline_tracker.start(self.run_name, {})

    store_init_configuration = _passed_on("store_config")
    log = _passed_on("log")
    finish = _passed_on("finish")


class WandBTracker(_ClientTracker):
    """Weights & Biases."""

    name = "wandb"
    main_process_only = False
    log_images = _passed_on("log_images")
    log_table = _passed_on("log_table")


class TrackioTracker(_ClientTracker):
    """Trackio."""

    name = "trackio"
    main_process_only = False


class SwanLabTracker(_ClientTracker):
    """SwanLab."""

    name = "swanlab"
    main_process_only = False
    log_images = _passed_on("log_images")

    @on_main_process
    def start(self) -> None:
        """Begins the run, and sets the framework that SwanLab's pages show."""
        super().start()
        import swanlab

        swanlab.config["FRAMEWORK"] = "🤗Accelerate"


class CometMLTracker(_ClientTracker):
    """Comet."""

    name = "comet_ml"


class MLflowTracker(_ClientTracker):
    """MLflow.

    Args:
        experiment_name: name of the experiment.
        logging_dir: folder for the artifacts of a new experiment.
        run_id, tags, nested_run, run_name, description: properties of the run; `tags` may be a JSON text.
    """

    name = "mlflow"
    log_artifact = _passed_on("log_artifact")
    log_artifacts = _passed_on("log_artifacts")
    log_figure = _passed_on("log_figure")

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | Path | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        if isinstance(tags, str):
            tags = json.loads(tags)
        options = {
            "logging_dir": logging_dir,
            "run_id": run_id,
            "tags": tags,
            "nested_run": nested_run,
            "run_name": run_name,
            "description": description,
        }
        self._stand_for(experiment_name or "Default", options)

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Writes values, and returns when the server has them; a thread sends those of `Accelerator.log`."""
        self.paceline_tracker.log_at_once(values, step, **kwargs)


class ClearMLTracker(_ClientTracker):
    """ClearML."""

    name = "clearml"
    log_images = _passed_on("log_images")
    log_table = _passed_on("log_table")

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__(run_name or "", **kwargs)


class DVCLiveTracker(_ClientTracker):
    """DVCLive."""

    name = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        if live is not None:
            kwargs["live"] = live
        super().__init__(run_name or "", **kwargs)


class _FolderTracker(_ClientTracker):
    """The base class of those of accelerate's tracker classes that write files.

    Args:
        run_name: name of the run.
        logging_dir: folder for its files.
        kwargs: arguments for the library's call that begins a run.
    """

    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | Path | None = ".", **kwargs: Any) -> None:
        super().__init__(run_name)
        self.logging_dir = Path(logging_dir or ".")
        self.init_kwargs = kwargs
        self.paceline_tracker = TRACKERS.get(str(self.name))(self.logging_dir, **kwargs)


class AimTracker(_FolderTracker):
    """Aim."""

    name = "aim"
    log_images = _passed_on("log_images")


class TensorBoardTracker(_FolderTracker):
    """TensorBoard."""

    name = "tensorboard"
    writer = property(lambda self: self.tracker)

    @on_main_process
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Stores the settings, and also writes them to `hparams.yml` in a folder that is named after the current time."""
        import yaml

        class Dumper(yaml.SafeDumper):
            """Writes settings that YAML does not know, such as a path, as text, as in TensorBoard's own file."""

        Dumper.add_multi_representer(object, lambda writer, value: writer.represent_str(str(value)))
        super().store_init_configuration(values)
        folder = self.logging_dir / self.run_name / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.dump(dict(values), Dumper=Dumper), encoding="utf-8")

    @on_main_process
    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Writes values; one that TensorBoard cannot show, such as None, is left out, as under accelerate."""
        for name, value in values.items():
            try:
                self.paceline_tracker.log({name: value}, step, **kwargs)
            except TrackerError as error:
                if error.code != "tracker-value":
                    raise
                if value is not None:
                    warn_once("compat", f"{name} is not logged: {error.problems[0].what}")

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs images; `kwargs` are passed to `SummaryWriter.add_images`."""
        for name, images in values.items():
            self.tracker.add_images(name, images, global_step=step, **kwargs)


_CLASSES: tuple[type[GeneralTracker], ...] = (
    AimTracker, TensorBoardTracker, WandBTracker, TrackioTracker, CometMLTracker, MLflowTracker, ClearMLTracker,
    DVCLiveTracker, SwanLabTracker,
)  # fmt: skip
LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {str(kind.name): kind for kind in _CLASSES}


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Registers a tracker class of a script, so that `log_with` can name it by the class's `name`.

    Raises:
        TrackerError: `tracker-shape`, if the class does not inherit from `GeneralTracker`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        what = f"{tracker_class!r} is no class of a tracker."
        fix = "let it inherit from `accelerate.tracking.GeneralTracker`, with a `name` of its own"
        raise TrackerChoiceError("tracker-shape", what, why="register_tracker_class got it", fix=fix)
    LOGGER_TYPE_TO_CLASS[str(tracker_class.name)] = tracker_class


class _Adapted:
    """Gives a tracker of accelerate's kind the interface of Paceline's.

    The tracker is an object of the script (`shown`), or it is made of the class `kind` when a run starts.
    """

    kind: ClassVar[type[GeneralTracker] | None] = None
    name = "custom"

    def __init__(self, folder: Any = None, shown: GeneralTracker | None = None, **options: Any) -> None:
        self._folder = folder
        self._options = options
        self.shown = shown
        if shown is not None:
            self.name = str(shown.name)

    @property
    def _behind(self) -> Any:
        """Paceline's tracker behind one of accelerate's classes; None for a class of a script."""
        # Subclasses are excluded: a script's subclass may do more in its `log`, which sending past it would leave out.
        if type(self.shown) not in _CLASSES:
            return None
        return cast(_ClientTracker, self.shown).paceline_tracker

    def run_id(self) -> str | None:
        """Returns what a later process needs to continue this run; None for a tracker of a script."""
        tracker = self._behind
        return None if tracker is None else tracker.run_id()

    def resume(self, run_id: str) -> None:
        """Makes `start` continue a run that an earlier process began."""
        self._options = {**TRACKERS.get(self.name).resume_options(run_id), **self._options}

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Makes the tracker if it has a class and no object yet, and begins the run."""
        if self.kind is not None:
            make: Callable[..., GeneralTracker] = self.kind  # each class has arguments of its own
            if getattr(self.kind, "requires_logging_directory", False):
                self.shown = make(run, self._folder, **self._options)
            else:
                self.shown = make(run, **self._options)
        assert self.shown is not None
        self.shown.start()
        if config:
            self.shown.store_init_configuration(dict(config))

    def log(self, values: Mapping[str, Any], step: int | None = None, **options: Any) -> None:
        """Logs values."""
        assert self.shown is not None
        if type(self.shown) is MLflowTracker:
            self.shown.paceline_tracker.log(values, step, **options)
        else:
            self.shown.log(values, step=step, **options)

    def finish(self, status: str = "finished") -> None:
        """Ends the run."""
        assert self.shown is not None
        self.shown.finish()


def _adapter_of(kind: type[GeneralTracker]) -> type[_Adapted]:
    """Makes a class with Paceline's interface that constructs a tracker of `kind` when a run starts."""
    name = str(kind.name)
    needs: dict[str, Any] = {}
    if name in TRACKERS.names():
        # With these attributes a missing package is reported as for Paceline's own tracker.
        native_class = TRACKERS.get(name)
        needs = {"requires": native_class.requires, "package": native_class.package}
    return type(kind.__name__, (_Adapted,), {"kind": kind, "name": name, **needs})


def _is_installed(name: str) -> bool:
    return name not in TRACKERS.names() or not missing_modules(TRACKERS.get(name))


class TrackerList(Trackers, MutableSequence[Any]):
    """The trackers of a run; for scripts it also is a list of the trackers that were started.

    Args:
        wanted: names, "all", trackers of scripts, or None.
        folder: folder for trackers that write files; None where the run has none.
        is_main: whether this is the main process.

    Raises:
        TrackerError: `tracker-folder`, `tracker-unknown`, `tracker-missing`, `tracker-shape`, with all problems at once.
    """

    def __init__(self, wanted: object, folder: str | Path | None, *, is_main: bool = True) -> None:
        chosen = _chosen(wanted, folder)
        self._has_folder = folder is not None
        try:
            super().__init__([_as_ours(choice) for choice in chosen], folder or ".", is_main=is_main)
        except TrackerError as error:
            raise TrackerChoiceError.of(list(error.problems)) from None

    @property
    def asked(self) -> list[Any]:
        """What `log_with` asked for: accelerate's trackers as members of `LoggerType`, those of scripts unchanged."""
        asked: list[Any] = []
        for name in self.names:
            chosen = self._wanted.get(name)
            if name in LoggerType:
                asked.append(LoggerType(name))
            elif isinstance(chosen, _Adapted):
                asked.append(chosen.shown)
            else:
                asked.append(name)
        return asked

    def folder_of(self, run: str) -> Path:
        """Returns the folder of a run; without `folder` it is the one that a native run has by default."""
        # The id with which a later process continues the run has to be stored somewhere in any case.
        if self._has_folder:
            return super().folder_of(run)
        return Path("runs") / run

    def log(
        self, values: Mapping[str, Any], step: int | None = None, options: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Logs values to each tracker.

        Args:
            values: values by name.
            step: number of the step.
            options: name of a tracker -> keyword arguments for its `log`.
        """
        if not self.is_main:
            return
        if not options:
            super().log(values, step)
            return
        for name, tracker in self.started.items():
            tracker.log(dict(values), step, **options.get(name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Returns a tracker as the script knows it, or with `unwrap` the object that it wraps.

        If no tracker was started, it returns a blank tracker, whose methods do nothing.

        Raises:
            TrackerChoiceError: `tracker-unknown`.
        """
        if not self.started:
            return GeneralTracker(_blank=True)
        word = text_of(name)
        if word not in self.started:
            raise TrackerChoiceError(
                "tracker-unknown",
                f"{word} is not an available tracker of this accelerator.",
                why=f"log_with = {self.names}",
                fix="add it to `log_with`",
            )
        tracker = super().get_tracker(word)
        if not isinstance(tracker, _Adapted) or tracker.shown is None:
            return tracker
        return tracker.shown.tracker if unwrap else tracker.shown

    def _shown(self) -> list[Any]:
        """Lists the trackers that were started, as the script knows them."""
        return [getattr(tracker, "shown", tracker) for tracker in self.started.values()]

    def __repr__(self) -> str:
        return repr(self._shown())

    def __len__(self) -> int:
        return len(self.started)

    def __eq__(self, other: object) -> bool:
        return self._shown() == list(other) if isinstance(other, list | TrackerList) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as of every list

    def assign(self, trackers: Iterable[Any]) -> None:
        """Makes these the trackers that were started; a script has started those that are new."""
        started_before = {id(getattr(tracker, "shown", tracker)): tracker for tracker in self.started.values()}
        started = {tracker.name: started_before.get(id(tracker)) or _as_ours(tracker) for tracker in trackers}
        self.started.clear()
        self.started.update(started)

    def insert(self, index: int, value: Any) -> None:
        """Adds a tracker that a script has started itself; `append` does so too."""
        trackers = self._shown()
        trackers.insert(index, value)
        self.assign(trackers)

    def __getitem__(self, place: Any) -> Any:
        return self._shown()[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        trackers = self._shown()
        trackers[place] = value
        self.assign(trackers)

    def __delitem__(self, place: Any) -> None:
        trackers = self._shown()
        del trackers[place]
        self.assign(trackers)


def _chosen(wanted: object, folder: str | Path | None) -> list[Any]:
    """Lists what `log_with` asks for, each choice once.

    "all" stands for every tracker whose packages are installed and which has the folder that it needs.
    """
    if wanted is None:
        wanted = []
    elif not isinstance(wanted, list | tuple):
        wanted = [wanted]
    choices: list[Any] = []  # names, and trackers of scripts
    for choice in wanted:
        is_name = isinstance(choice, str | LoggerType)
        choices.append(text_of(choice) if is_name else choice)
    if "all" in choices:
        trackers = [choice for choice in choices if not isinstance(choice, str)]
        usable = [name for name in _available() if folder is not None or not _needs_folder(name)]
        choices = usable + trackers
    chosen = list(dict.fromkeys(choices))
    _check_known(chosen)
    without_folder = []
    if folder is None:
        without_folder = [choice for choice in chosen if isinstance(choice, str) and _needs_folder(choice)]
    if without_folder:
        what = f"Logging with `{', '.join(without_folder)}` requires a `logging_dir`, and the run has none."
        fix = "pass `Accelerator(project_dir='runs')`, or `ProjectConfiguration(logging_dir='runs/logs')`"
        why = "neither project_dir nor logging_dir is set"
        raise TrackerChoiceError.of([Problem("tracker-folder", what, why=why, fix=fix)])
    return chosen


def _check_known(choices: list[Any]) -> None:
    """Refuses names of trackers that neither accelerate nor Paceline has.

    Raises:
        TrackerChoiceError: `tracker-unknown`.
    """
    tracker_names = {*LOGGER_TYPE_TO_CLASS, *TRACKERS.names()}
    problems = []
    for choice in choices:
        if isinstance(choice, str) and choice not in tracker_names:
            what = f"Unsupported logging capability: {choice}. Choose between {LoggerType.list()}."
            fix = "use one of these names, or pass your own tracker, which inherits `GeneralTracker`"
            problems.append(Problem("tracker-unknown", what, why="log_with names it", fix=fix))
    if problems:
        raise TrackerChoiceError.of(problems)


def _needs_folder(name: str) -> bool:
    kind = LOGGER_TYPE_TO_CLASS.get(name)
    return bool(getattr(kind, "requires_logging_directory", False))


def _as_ours(choice: object) -> Any:
    """Turns a choice of `log_with` into what `Trackers` accepts."""
    if isinstance(choice, GeneralTracker):
        return _Adapted(shown=choice)
    if isinstance(choice, str) and choice in LOGGER_TYPE_TO_CLASS:
        return _adapter_of(LOGGER_TYPE_TO_CLASS[choice])
    return choice


def _available() -> list[str]:
    return [name for name in LOGGER_TYPE_TO_CLASS if _is_installed(name)]


def get_available_trackers() -> list[Any]:
    """Lists those of accelerate's trackers whose packages are installed, as members of `LoggerType`."""
    return [LoggerType(name) for name in _available() if name in LoggerType]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[Any]:
    """Lists the trackers of `log_with` whose packages are installed, each once.

    Raises:
        TrackerError: `tracker-folder`, `tracker-unknown`.
    """
    usable = []
    for choice in _chosen(log_with, logging_dir):
        if isinstance(choice, str) and choice in LOGGER_TYPE_TO_CLASS and not _is_installed(choice):
            continue
        TrackerList([choice], logging_dir)  # made only because it raises for an unknown choice
        is_member = isinstance(choice, str) and choice in LoggerType
        usable.append(LoggerType(choice) if is_member else choice)
    return usable
