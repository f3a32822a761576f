"""A rehearsal: the user's own script up to and through an optimizer step, as one rank of many, on fake tensors.

    child       a forked process, which is thrown away: whatever the script does to itself ends with it
    world       rank 0 of as many as asked for; torch's "fake" process group, `Echo` for our own collectives
    stage       constructors and functions at the seams of the house are replaced by those of a rehearsal
    script      modules are built as fake tensors; `prepare` applies the real chain to them; batches are real
    step 1      warms up: optimizer states come to be, torch works out shapes (with DDP step 2 too)
    next step   is what is reported; then the script is stopped

Nothing of this is known to the code that is rehearsed.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from paceline.base import env as environment
from paceline.base.errors import PacelineError, PlanError
from paceline.base.temporary import temporary_folder
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Plan
from paceline.planner.echo import Echo
from paceline.planner.ledger import Ledger, Peak
from paceline.planner.witness import Traffic, Witness


@dataclass(frozen=True)
class Rehearsal:
    """What came of a rehearsal.

    Attributes:
        plan: the plan of the models prepared last.
        models: facts of all prepared models.
        memory: over one whole step, on rank 0; None where the script did not come to one.
        traffic: of that step.
        optimizer: bytes of optimizer states that this rank holds.
        problem: why the script did not come to a step; "" where it did.
        seconds: how long it took.
    """

    plan: Plan
    models: tuple[ModelFacts, ...]
    memory: Peak | None
    traffic: Traffic
    optimizer: int = 0
    problem: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Troupe:
    """How many ranks are imagined, and what they are told.

    Attributes:
        world_size: ranks in all.
        local_size: ranks on one node.
        settings: environment variables that carry settings, as a launcher hands them to its workers.
        accelerated: whether the ranks have accelerators, whose optimizers compute otherwise than the CPU's.
        compat: library whose names are served to the script; "" for none.
        memory: bytes of one rank, for scripts that leave their plan to `auto`; 0 takes this host's.
    """

    world_size: int
    local_size: int
    settings: Mapping[str, str] = field(default_factory=dict)
    accelerated: bool = False
    compat: str = ""
    memory: int = 0


class _Finished(BaseException):
    """The step that was to be seen has been seen."""


def rehearse(work: Callable[[], object], troupe: Troupe) -> Rehearsal:
    """Runs `work` (a script, or a function that trains) as rank 0 of `troupe`, in a child process.

    Raises:
        PlanError: `plan-rehearsal`, where nothing was prepared; whatever error of ours the script runs into.
    """
    kind, value = in_child(lambda: _perform(work, troupe))
    if kind == "result":
        return value
    if kind == "ours":
        raise value
    raise PlanError(
        "plan-rehearsal",
        "the script could not be rehearsed: it prepared no model.",
        why=value,
        fix="see that `python` runs the script up to `accelerator.prepare(model, ...)` with these arguments",
    )


def in_child(work: Callable[[], object]) -> tuple[str, Any]:
    """What `work` gives in a forked process: a result, an error of ours, or what else happened, in words."""
    place = temporary_folder()
    with tempfile.TemporaryFile(dir=place) as parcel, tempfile.TemporaryFile("w+", dir=place) as said:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            try:
                outcome: tuple[str, Any] = ("result", work())
            except PacelineError as error:
                outcome = ("ours", error)
            except BaseException as error:
                outcome = ("other", _words(error))
            parcel.write(pickle.dumps(outcome))
            parcel.flush()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        parcel.seek(0)
        data = parcel.read()
        if data:
            return pickle.loads(data)  # type: ignore[no-any-return]
        said.seek(0)
        tail = said.read().strip().splitlines()[-1:] or ["it said nothing"]
        return "other", f"the process of the rehearsal ended ({os.waitstatus_to_exitcode(status)}): {tail[0]}"


def _words(error: BaseException) -> str:
    """An exception in one line, with the last line of code outside of libraries."""
    if isinstance(error, SystemExit):
        return f"it left by sys.exit({error.code})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _library(f.filename)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}{place}"


def _library(path: str) -> bool:
    return "site-packages" in path or os.path.dirname(os.path.dirname(__file__)) in path or path.startswith("<")


def _perform(work: Callable[[], object], troupe: Troupe) -> Rehearsal:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    began = time.monotonic()
    warnings.simplefilter("ignore")  # of fake tensors and fake groups; nobody could act on them
    nodes = troupe.world_size // troupe.local_size
    numbers = {"RANK": 0, "WORLD_SIZE": troupe.world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": troupe.local_size}
    numbers |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": nodes, "MASTER_PORT": 1}
    texts = {name: str(number) for name, number in numbers.items()}
    environment.export({**texts, "MASTER_ADDR": "localhost", **troupe.settings})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=troupe.world_size)
    stage = Stage(Witness(Ledger(), FakeTensorMode(allow_non_fake_inputs=True), troupe.local_size), troupe)
    stage.set()
    problem = ""
    try:
        with stage.witness:
            work()
    except _Finished:
        pass
    except PacelineError:
        if stage.plan is None:
            raise
        problem = _words(sys.exception() or RuntimeError())
    except BaseException as error:
        if stage.plan is None:
            raise
        problem = _words(error)
    return stage.result(problem, time.monotonic() - began)


class Stage:
    """What is put in the place of what at the seams, and what is seen there.

    Args:
        witness: sees the operations.
        troupe: who is imagined.
    """

    def __init__(self, witness: Witness, troupe: Troupe) -> None:
        self.witness, self.troupe = witness, troupe
        self.plan: Plan | None = None
        self.models: dict[int, ModelFacts] = {}
        self._modules: list[torch.nn.Module] = []
        self._steps: dict[int, int] = {}  # id of an optimizer -> its steps
        self._warm_up = 1
        self._warm: Traffic | None = None  # of the steps that warm up, until the one that counts is over
        self._start = 0

    @property
    def ledger(self) -> Ledger:
        """Where memory is entered."""
        return self.witness.ledger

    def set(self) -> None:
        """Replaces everything; there is no way back but the end of the process."""
        nothing = lambda *_, **__: None  # noqa: E731
        replace_at("paceline.world.device.detect", lambda *_, **__: torch.device("cpu"))
        replace_at("paceline.accelerator.Collectives", Echo)
        if "accelerate" in self.troupe.compat.split(","):
            replace_at("paceline.compat.accelerate.state.Collectives", Echo)
        if "deepspeed" in self.troupe.compat.split(","):
            for call in ("begins", "call"):  # ranks that do not exist are not waited for
                replace_at(f"paceline.compat.deepspeed.attendance.Attendance.{call}", nothing)
        without_files(self.troupe.compat)
        replace_at("paceline.parallel.replicate.install", nothing)
        wrap_at("paceline.data.loader.on_device", self._batches)
        wrap_at("paceline.preparation.Preparation._prepare_models", self._preparing)
        wrap_at("paceline.preparation.choose_fused", self._choosing)
        wrap_at("paceline.world.mesh.init_device_mesh", self._unseen)
        replace_at("paceline.parallel.replicate._first_window", _skip_first_window)
        replace_at("paceline.parallel.agreement.Statement._exchange", lambda *_: [])
        replace_at("paceline.parallel.agreement.Statement.heard", lambda said: list(said._own))
        replace_at("torch.nn.parallel.distributed._verify_param_shape_across_processes", nothing)
        wrap_at("torch.UntypedStorage.resize_", self._resizing)
        wrap_at("torch.utils.swap_tensors", self._swapping)
        replace_at("torch._subclasses.fake_tensor.FakeTensor.__format__", lambda tensor, spec: format(0.0, spec))
        replace_at("torch._subclasses.fake_tensor.FakeTensor.numpy", _numpy)
        if self.troupe.memory:
            replace_at("paceline.planner.fit.memory_of", lambda *_: self.troupe.memory)
        if self.troupe.accelerated:
            _optimizers_as_on_accelerators()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    # -- the seams -------------------------------------------------------------------------------------------

    def _preparing(self, prepare_models: Any) -> Any:
        def prepared(preparation: Any, models: Any, *rest: Any) -> Any:
            run = preparation.run
            for model, _ in models:
                self.witness.fake_module(model)
            if run.plan.layout.pp > 1 or "pp" in run.plan.open:
                replace_at("torch.distributed.pipelining.stage.PipelineStage._send_meta", lambda *_: None)
                replace_at("torch.distributed.pipelining.stage.PipelineStage._recv_meta", _gradients_like_outputs)
            self.witness.live = True
            before = prepare_models(preparation, models, *rest)
            self.plan = run.plan
            for each in run.prepared.models:
                self.models[id(each)] = each.facts
                self._modules.append(each.module)
                if isinstance(each.wrapped, DistributedDataParallel):
                    _reduce_by_hand(each.wrapped)
                    self._warm_up = 2  # its first step with communication makes its buckets anew
                self.ledger.label([*each.module.parameters(), *each.module.buffers()], "parameters")
            return before

        return prepared

    def _choosing(self, choose_fused: Any) -> Any:
        """Fused kernels are chosen by the type of the parameters: real ones stand in for the moment."""

        def chosen(optimizer: Any, sparse: bool) -> Any:
            if self.troupe.accelerated:
                return None
            held = [group["params"] for group in optimizer.param_groups]
            plain = all(hasattr(p, "fake_mode") for params in held for p in params)
            for group in optimizer.param_groups if plain else ():
                group["params"] = [torch.nn.Parameter(torch.empty(1)) for _ in group["params"]]
            decision = choose_fused(optimizer, sparse)
            for group, params in zip(optimizer.param_groups, held, strict=True):
                group["params"] = params
            return decision

        return chosen

    def _batches(self, _: Any) -> Any:
        """Batches are read as ever, unseen, and counted."""

        def batches(steps: Iterator[Any], device: Any, non_blocking: bool) -> Iterator[Any]:
            while True:
                with self.witness.away():
                    step = next(steps, None)
                if step is None:
                    return
                self.ledger.label(tree_leaves(step[0]), "batches")
                yield step

        return batches

    def _unseen(self, make: Any) -> Any:
        """For what computes with numbers of its own, such as the ranks of a large mesh."""

        def made(*args: Any, **kwargs: Any) -> Any:
            with self.witness.away():
                return make(*args, **kwargs)

        return made

    def _resizing(self, resize: Any) -> Any:
        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self.ledger.resized(storage)
            return result

        return resized

    def _swapping(self, swap: Any) -> Any:
        """A tensor that something refers to weakly cannot be swapped; torch's own table of fakes does."""

        def swapped(one: Any, other: Any) -> None:
            self.witness.fakes.fake_tensor_converter.meta_converter.tensor_memo.clear()  # type: ignore[union-attr]
            swap(one, other)

        return swapped

    # -- steps -----------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        gradients = [p.grad for module in self._modules for p in module.parameters()]
        self.ledger.label([each for each in gradients if each is not None], "gradients")
        self.ledger.phase = "other"

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.ledger.phase = "activations"
        self.ledger.label(_states(optimizer), "optimizer")
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if steps > self._warm_up:
            self._warm = None
            raise _Finished
        if steps == self._warm_up and sum(self._steps.values()) == steps:
            self._start, self._warm, self.witness.traffic = self.ledger.mark, self.witness.traffic, Traffic()

    def result(self, problem: str, seconds: float) -> Rehearsal:
        """What was seen."""
        if self.plan is None:
            raise RuntimeError("it ended without a call of `prepare` with a model")
        if not self._steps and not problem:
            problem = "it ended before an optimizer step"
        start, traffic = self._start, self.witness.traffic
        if self._warm is not None:  # it never came to a whole second step: the first is all there is to tell
            start, traffic = 0, self._warm
        memory = self.ledger.peak(start) if self._steps else None
        held = memory.largest["optimizer"] if memory else 0
        facts = tuple(self.models.values())
        return Rehearsal(self.plan, facts, memory, traffic, held, "" if memory else problem, seconds)


def without_files(compat: str) -> None:
    """From now on what a script saves is not written, and what it would go on from is not looked for.

    Args:
        compat: libraries whose names are served to the script.
    """
    nothing = lambda *_, **__: None  # noqa: E731
    for writes in ("states.States.load", "states.States.on_main", "states.States._source", "states.States._listen",
                   "states.States.wait", "accelerator.save_object", "accelerator.Accelerator.save_model",
                   "observe.trackers.group.Trackers.start"):  # fmt: skip
        replace_at(f"paceline.{writes}", nothing)
    replace_at("paceline.states.States.save", lambda states, path, **_: path or "checkpoint")
    if "accelerate" in compat.split(","):
        replace_at(
            "paceline.compat.accelerate.accelerator.Accelerator.save_state",
            lambda accelerator, output_dir=None, *_, **__: output_dir or "checkpoint",
        )
    if "deepspeed" in compat.split(","):
        for writes in ("save_checkpoint", "save_16bit_model"):
            replace_at(f"paceline.compat.deepspeed.engine.DeepSpeedEngine.{writes}", lambda *_, **__: True)


def wrap_at(path: str, wrapper: Callable[[Any], Any]) -> None:
    """Puts `wrapper(what stands there)` in the place of `path`, a name in a module or in a class there.

    A room above this one is looked up and not imported: the planner knows the seams of the house, not its facade.
    """
    parts = path.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:-1]:
            owner = getattr(owner, name)
        setattr(owner, parts[-1], wrapper(getattr(owner, parts[-1])))
        return
    raise AssertionError(f"no module {path}")


def replace_at(path: str, value: Any) -> None:
    wrap_at(path, lambda _: value)


def _states(optimizer: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for state in optimizer.state.values():
        found += [value for value in tree_leaves(state) if isinstance(value, torch.Tensor)]
    return found


def _skip_first_window(model: Any, state: Any) -> None:
    """In place of DDP's first window, which looks at values: every parameter was used."""
    state.looking, model.require_backward_grad_sync = False, True
    state.touched = state.armed = False


def _reduce_by_hand(model: Any) -> None:
    """DDP waits for what a fake group never answers; a hook answers for it."""

    def hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations, and knows only its own
        dist.all_reduce(bucket.buffer(), group=group)
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    if not model._comm_hooks:
        model.register_comm_hook(model.process_group, hook)


def _gradients_like_outputs(stage: Any, source: int) -> Any:
    """What the next stage of a pipeline would tell of the gradients that it sends back: they have the outputs' form."""
    from torch.distributed.pipelining.stage import _StageBackwardMeta

    return _StageBackwardMeta(backward_metas=stage._stage_meta.outputs)


def _numpy(tensor: torch.Tensor, **_: Any) -> Any:
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).numpy()


def _optimizers_as_on_accelerators() -> None:
    """There, torch's optimizers compute on all parameters at once, with temporary tensors as large."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import _foreach_utils

    devices = [*_foreach_utils._get_foreach_kernels_supported_devices(), "cpu"]
    for module in ("torch.utils._foreach_utils", "torch.optim.optimizer"):
        replace_at(f"{module}._get_foreach_kernels_supported_devices", lambda: devices)
    importlib.import_module("torch.optim.optimizer")._foreach_supported_types.append(FakeTensor)
