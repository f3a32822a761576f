"""A rehearsal runs the user's own script up to and through an optimizer step, as one rank of many, on fake tensors.

child       a forked process, so that whatever the script changes ends with it
world       rank 0 of as many as asked for; torch's "fake" process group, and `LoopbackCollectives` for our own collectives
runtime     `RehearsalRuntime` takes the place of the real one: no devices, no other ranks, no files
script      modules are built as fake tensors; `prepare` applies the real chain to them; batches are real
step 1      warms up: the optimizer makes its states, and torch infers shapes (with DDP in step 2 too)
next step   is the one that is reported; then the script is stopped
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.base import env as environment
from paceline.base.errors import LaunchError, PacelineError, PlanError
from paceline.base.ours import our_folders
from paceline.base.temporary import temporary_folder
from paceline.plan.facts import ModelFacts
from paceline.plan.plan import Plan
from paceline.planner.estimate import Need, estimate
from paceline.run.run import Run
from paceline.torch_internals.forks import renew_threads
from paceline.world import runtime
from paceline.world.runtime import Runtime
from paceline.world.tree import tensors
from paceline.world.world import World
from paceline_lens.forecast.allocation_trace import AllocationTrace, Peak
from paceline_lens.forecast.loopback import LoopbackCollectives
from paceline_lens.forecast.operation_trace import OperationTrace
from paceline_lens.forecast.work import Work
from paceline_lens.torch_internals import fake, imaginary

R = TypeVar("R")


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal.

    Attributes:
        plan: the plan of the models that were prepared last.
        models: the facts of all prepared models.
        memory: the peak memory over one whole step, on rank 0; None if the script did not reach a step.
        work: what that step computes and sends.
        optimizer: bytes of optimizer states that this rank holds.
        problem: why the script did not reach a step; "" if it did.
        seconds: how long the rehearsal took.
        on_host: whether the device is the host, see `Need`.
    """

    plan: Plan
    models: tuple[ModelFacts, ...]
    memory: Peak | None
    work: Work
    optimizer: int = 0
    problem: str = ""
    seconds: float = 0.0
    on_host: bool = False

    def need(self, states: float) -> Need:
        """Returns what the models need, with so many float32 values of optimizer state for each trained parameter."""
        return Need(self.models, self.activations, states, self.on_host)

    @property
    def activations(self) -> int:
        """The bytes that a rank would keep between forward and backward without any strategy; 0 if there was no step.

        What the plan takes off them, for example by recomputation, is added to those that were seen.
        """
        if self.memory is None:
            return 0
        probe = 10**12
        kept = estimate(self.plan, Need(self.models, probe, on_host=self.on_host)).activations / probe
        return int(self.memory.largest["activations"] / kept)

    @property
    def local_states(self) -> float:
        """The float32 values of optimizer state that this rank keeps for each trained parameter of the models.

        It is 2, as for Adam, if the script did not reach a step, or if the states are elsewhere.
        """
        if self.memory is None or not self._trainable or self._states_are_elsewhere:
            return 2.0
        return self.optimizer / (4 * self._trainable)

    @property
    def whole_states(self) -> float:
        """The same as `local_states`, with the parts that other ranks hold if the states are sharded."""
        if self.memory is None or not self._trainable or self._states_are_elsewhere:
            return 2.0
        # What this rank would keep if there were one value for each trained parameter.
        of_one_value = estimate(self.plan, self.need(1.0)).optimizer
        return round(self.optimizer / max(1, of_one_value))

    @property
    def _states_are_elsewhere(self) -> bool:
        return self.plan.offloads_states and not estimate(self.plan, self.need(1.0)).optimizer

    @property
    def _trainable(self) -> int:
        return sum(facts.trainable for facts in self.models)


@dataclass(frozen=True)
class SimulatedWorld:
    """The ranks that a rehearsal simulates, and what a launcher would tell them.

    Attributes:
        world_size: the number of ranks in total.
        local_size: the number of ranks on one node.
        settings: environment variables that carry settings, as a launcher passes them to its workers.
        accelerated: whether the ranks have accelerators, whose optimizers use other kernels than the CPU's.
        compat: the library whose names are provided to the script; "" for none.
        memory: the memory of one rank in bytes, for scripts that leave their plan to `auto`; 0 takes this host's.
    """

    world_size: int
    local_size: int
    settings: Mapping[str, str] = field(default_factory=dict)
    accelerated: bool = False
    compat: str = ""
    memory: int = 0


class _Finished(BaseException):
    """Ends the script after the step that is reported. A script's `except Exception` does not catch it."""


def rehearse(work: Callable[[], object], simulated: SimulatedWorld, observer: Runtime | None = None) -> Rehearsal:
    """Runs `work` (a script, or a function that trains) as rank 0 of a simulated world, in a child process.

    Args:
        observer: a second `Runtime` that gets the events of the run, too.

    Raises:
        PlanError: `plan-rehearsal`, if the script prepared no model. An error of Paceline in the script is raised here, too.
    """
    try:
        return in_child(lambda: _perform(work, simulated, observer or Runtime()))
    except ChildError as error:
        raise PlanError(
            "plan-rehearsal",
            "the script could not be rehearsed: it prepared no model.",
            why=str(error),
            fix="see that `python` runs the script up to `accelerator.prepare(model, ...)` with these arguments",
        ) from None


def with_devices(look: Callable[[], R]) -> R:
    """Runs what looks at this host's accelerators in a forked process: one that has touched them cannot be forked any more.

    Raises:
        LaunchError: `tune-device`, if that process ended otherwise than by a result or by an error of Paceline.
    """
    try:
        return in_child(look)
    except ChildError as error:
        raise LaunchError(
            "tune-device",
            "this host's devices could not be looked at.",
            why=str(error),
            fix="do without them: `--cpu`",
        ) from None


class ChildError(RuntimeError):
    """What ended the work of `in_child`, in words."""


def in_child(work: Callable[[], R]) -> R:
    """Runs `work` in a forked process, and returns its result. An error of Paceline in it is raised here, too.

    Raises:
        ChildError: if something else ended it.
    """
    folder = temporary_folder()
    with tempfile.TemporaryFile(dir=folder) as parcel, tempfile.TemporaryFile("w+", dir=folder) as output:
        # Text that is still in a buffer would be copied into the child and printed twice.
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            renew_threads()
            # The child must never return into the code of its parent: every exception ends here, too.
            try:
                outcome: tuple[Any, Exception | None] = (work(), None)
            except PacelineError as error:
                outcome = (None, error)
            except BaseException as error:
                outcome = (None, ChildError(_words(error)))
            parcel.write(pickle.dumps(outcome))
            parcel.flush()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        parcel.seek(0)
        data = parcel.read()
        if not data:
            output.seek(0)
            tail = output.read().strip().splitlines()[-1:] or ["it said nothing"]
            raise ChildError(f"the process ended ({os.waitstatus_to_exitcode(status)}): {tail[0]}")
        result, failure = pickle.loads(data)
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]


def _words(error: BaseException) -> str:
    """Describes an exception in one line, with the last line of code that is not in a library."""
    if isinstance(error, SystemExit):
        return f"it left by sys.exit({error.code})"
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not _is_library(frame.filename):
            place = f" ({frame.filename}:{frame.lineno})"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}{place}"


def _is_library(path: str) -> bool:
    return "site-packages" in path or path.startswith((*our_folders(), "<"))


def _perform(work: Callable[[], object], simulated: SimulatedWorld, observer: Runtime) -> Rehearsal:
    began = time.monotonic()
    warnings.simplefilter("ignore")  # of fake tensors and fake groups; nobody could act on them
    variables = {
        "RANK": 0,
        "WORLD_SIZE": simulated.world_size,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": simulated.local_size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": simulated.world_size // simulated.local_size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }
    if not simulated.accelerated and environment.get("PACELINE_TRANSPORT") == "auto":
        # Over gloo, ranks send to each other in pairs and need buffers to receive, which a native collective does not.
        variables["PACELINE_TRANSPORT"] = "pairwise"
    environment.export({name: str(value) for name, value in variables.items()} | dict(simulated.settings))
    imaginary.join_imaginary_group(simulated.world_size)
    fakes = fake.FakeTensorMode(allow_non_fake_inputs=True)
    trace = OperationTrace(AllocationTrace(), fakes, simulated.local_size)
    rehearsal = RehearsalRuntime(trace, simulated, observer)
    runtime.use(rehearsal)
    problem = ""
    with ExitStack() as stack:
        stack.enter_context(fake.zeros_for_values())
        stack.enter_context(fake.swappable(fakes))
        stack.enter_context(fake.observed_resizes(trace.allocations.resized))
        # Kernels that a step compiles itself, as torchao's do, have no values here to be compiled for.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if simulated.accelerated:
            stack.enter_context(fake.grouped_optimizer_kernels())
        register_optimizer_step_pre_hook(rehearsal.before_optimizer_step)
        register_optimizer_step_post_hook(rehearsal.after_optimizer_step)
        try:
            with trace:
                work()
        except _Finished:
            pass
        except BaseException as error:
            if rehearsal.plan is None:
                raise
            problem = _words(error)
    return rehearsal.result(problem, time.monotonic() - began)


class RehearsalRuntime(Runtime):
    """The runtime of rank 0 in a simulated world, which records the run.

    Args:
        trace: records the operations.
        simulated: the simulated world.
        observer: a second `Runtime` that gets configs and follows the run, too.

    Attributes:
        plan: the plan of the models that were prepared last; None before.
    """

    keeps_files = False
    others_answer = False

    def __init__(self, trace: OperationTrace, simulated: SimulatedWorld, observer: Runtime) -> None:
        self.plan: Plan | None = None
        self.has_own_memory = simulated.accelerated
        self._trace = trace
        self._allocations = trace.allocations
        self._simulated = simulated
        self._observer = observer
        self._facts: dict[int, ModelFacts] = {}  # by id of the prepared model
        self._modules: list[nn.Module] = []
        self._steps: dict[int, int] = {}  # id of an optimizer -> its steps
        self._warm_up_steps = 1
        self._warm_up_work: Work | None = None  # until the step that counts is over
        self._start = 0
        self._stack = ExitStack()

    # -- the surroundings ------------------------------------------------------------------------------------

    def device(self, world: World, *, cpu: bool = False, index: int | None = None) -> torch.device:
        """Returns the CPU, whose fake tensors stand for those of any device."""
        return torch.device("cpu")

    def collectives(self, world: World, device: torch.device) -> LoopbackCollectives:
        """Returns collectives that this rank answers itself."""
        return LoopbackCollectives(world, device=device)

    def memory(self, device: torch.device, local_size: int) -> int:
        """Returns the memory in bytes of the device that the run is planned for."""
        return self._simulated.memory or super().memory(device, local_size)

    def host_memory(self, local_size: int) -> int | None:
        """Returns None: nobody said how much memory the hosts of that device have."""
        return None

    # -- what happens in the run -----------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        """Follows the models of the run, and lets the observer follow its steps."""
        run.events.preparing.subscribe(partial(self._preparing, run))
        run.events.prepared.subscribe(partial(self._prepared, run))
        # What is on the host is not in the memory of the device.
        run.events.kept_on_host.subscribe(self._allocations.leave_out)
        self._observer.begin(run)

    def _preparing(self, run: Run, models: Sequence[nn.Module]) -> None:
        """Makes the tensors of the models fake; from here on all large tensors are."""
        for model in models:
            self._trace.fake_module(model)
        if run.plan.layout.pp > 1 or "pp" in run.plan.open:
            self._stack.enter_context(imaginary.without_stage_messages())
        self._trace.fakes_everywhere = True

    def _prepared(self, run: Run, models: Sequence[nn.Module]) -> None:
        """Records the plan, and which allocations hold parameters."""
        self.plan = run.plan
        for model in run.prepared.models:
            self._facts[id(model)] = model.facts
            self._modules.append(model.module)
            self._allocations.label([*model.module.parameters(), *model.module.buffers()], "parameters")

    def batches(self, steps: Iterator[Any]) -> Iterator[Any]:
        """Reads batches without recording what the loader does, and labels their memory."""
        while True:
            with self._trace.paused():
                step = next(steps, None)
            if step is None:
                return
            self._allocations.label(tensors(step[0]), "batches")
            yield step

    def foreign_config(self, library: str, config: Any) -> Any:
        """Returns the config as the observer changes it."""
        return self._observer.foreign_config(library, config)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Labels the gradients; whatever is allocated from here on is temporary memory of the optimizer."""
        for module in self._modules:
            gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            self._allocations.label(gradients, "gradients")
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._allocations.begin_step(stepped)
        self._trace.in_optimizer = True

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Ends the script after the step that counts."""
        self._allocations.end_step()
        self._trace.in_optimizer = False
        for state in optimizer.state.values():
            self._allocations.label(tensors(state), "optimizer")
        steps = self._steps.get(id(optimizer), 0) + 1
        self._steps[id(optimizer)] = steps
        if steps > self._warm_up_steps:
            self._warm_up_work = None
            raise _Finished
        if steps == self._warm_up_steps and sum(self._steps.values()) == steps:
            self._start = self._allocations.mark
            self._warm_up_work = self._trace.work
            self._trace.work = Work()

    def result(self, problem: str, seconds: float) -> Rehearsal:
        """Returns what was recorded."""
        if self.plan is None:
            raise RuntimeError("it ended without a call of `prepare` with a model")
        facts = tuple(self._facts.values())
        on_host = not self.has_own_memory
        if not self._steps:
            problem = problem or "it ended before an optimizer step"
            return Rehearsal(self.plan, facts, None, self._trace.work, 0, problem, seconds, on_host)
        start = self._start
        work = self._trace.work
        # The script ended before the step after the warm-up was complete, so that only the warm-up can be reported.
        if self._warm_up_work is not None:
            start = 0
            work = self._warm_up_work
        memory = self._allocations.peak(start)
        return Rehearsal(self.plan, facts, memory, work, memory.largest["optimizer"], "", seconds, on_host)
