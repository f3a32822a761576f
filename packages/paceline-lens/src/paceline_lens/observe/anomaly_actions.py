"""`Anomalies`: joins what judges a step (`observe/anomalies.py`) to the run, and does what is to be done.

    backward        each adds its part of the window's loss                           (nothing is waited for)
    clip            the norm that it took, so that it is not taken twice
    optimizer.step  before it: loss and norm are read and gathered over all ranks      one wait, one small message
                    -> judged by every rank, on the same numbers -> log | skip | rollback | stop

A rollback happens in place, before `optimizer.step` returns: everything is loaded from the newest checkpoint but the positions
of the loaders. The loop of the script goes on with the batch after the bad one; so whatever was read since the checkpoint is
left out, under every plan and at every width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.base.errors import CheckpointError, ConfigError, Problem
from paceline.base.exits import STOPPED
from paceline.base.log import logger
from paceline.checkpoint.state.train_state import KINDS as STATE_KINDS
from paceline.config import Overrides
from paceline.optim.accumulate import Pass
from paceline.optim.clip import clip_grad_norm
from paceline.optim.optimizer import PreparedOptimizer
from paceline.plan.data import Position
from paceline.plan.options import read
from paceline.run.run import Run
from paceline.run.states import States
from paceline.world.events import StepAnomaly
from paceline.world.param_groups import parameters_of
from paceline_lens.observe.anomalies import (
    KINDS,
    NAME,
    Anomaly,
    AnomalyOptions,
    Detector,
    StepFacts,
    flattened,
    strongest,
)

_MOST_LOSSES = 4096  # of a script that calls backward and never steps, the last ones are enough
_JOURNAL_NAMES = {"nan": "nan", "loss_spike": "loss-spike", "gradient_norm": "gradient-norm"}


Options = AnomalyOptions


def overrides(argument: Any, overrides: Overrides) -> Overrides:
    """Adds what `Accelerator(anomalies=...)` says to the options (`paceline.run.observers`).

    Raises:
        ConfigError: `anomaly-options`, if the argument is not a mapping.
    """
    if not isinstance(argument, Mapping):
        raise ConfigError(
            "anomaly-options",
            f"anomalies cannot be {argument!r}.",
            why="it is a mapping from each kind of anomaly to an action",
            fix='write it as a mapping, such as anomalies={"nan": "skip"}',
        )
    options = dict(overrides.options or {})
    options[NAME] = {**options.get(NAME, {}), **flattened(argument)}
    return replace(overrides, options=options)


def join(run: Run, states: States, joined: Mapping[str, Any]) -> Anomalies | None:
    """Begins to look for anomalies (`paceline.run.observers`); None, at no cost for the run, if its options name none.

    Raises:
        ConfigError: `anomaly-options`, `anomaly-rollback`; all problems at once.
    """
    block = flattened(run.settings.options.get(NAME, {}))
    places = {decision.field: decision.where or decision.source for decision in run.decisions}
    options, wrong = read(AnomalyOptions, block, NAME, places)
    problems = [Problem("anomaly-options", problem.what, problem.why, problem.fix) for problem in wrong]
    if "rollback" in options.action_of.values() and run.project_dir is None:
        problems.append(
            Problem(
                "anomaly-rollback",
                "a rollback loads the newest checkpoint, but the run has no folder for checkpoints.",
                why=f"anomalies: {_actions_in_words(options)}; project_dir=None",
                fix="construct `Accelerator(project_dir='runs/mine')` and call `save_state()` in the loop; or choose skip or "
                "stop",
            )
        )
    elif "rollback" in options.action_of.values() and run.plan.semantics.checkpoint == "library":
        problems.append(
            Problem(
                "anomaly-rollback",
                "this run cannot go back to a checkpoint after an anomaly.",
                why=[
                    f"anomalies: {_actions_in_words(options)}",
                    f"a folder of {run.plan.semantics.library}'s holds no positions of loaders and no statistics",
                ],
                fix="choose skip or stop",
            )
        )
    if problems:
        raise ConfigError.of(problems)
    if not options.action_of or not run.runtime.keeps_files:
        return None
    return Anomalies(run, states, options)


class Anomalies:
    """Looks at each step of one run before it is taken.

    Args:
        run: whose steps these are.
        states: where a rollback goes back to.
        options: what is looked for.

    Attributes:
        counts: anomalies so far by kind, and steps "skipped" and "rollbacks".

    Ranks: all take part in each step of a prepared optimizer.
    """

    def __init__(self, run: Run, states: States, options: AnomalyOptions) -> None:
        self.counts = dict.fromkeys((*KINDS, "skipped", "rollbacks"), 0)
        self._run = run
        self._states = states
        self._options = options
        self._detectors: dict[str, Detector] = {}  # by the number of the optimizer
        self._losses: list[tuple[Pass, Tensor]] = []  # each backward pass with its part of the window's loss
        self._norms: list[Tensor] = []  # that clipping has taken in this window
        self._skipped_in_a_row = 0
        self._reviewed = -1  # backward passes when the last step was judged
        self._admitted = True  # what came of it
        self._stepped: set[int] = set()  # ids of the optimizers that have heard of it
        self._is_partial = False  # the window goes on from a checkpoint, or one was saved in it
        states.save_beside(NAME, self)
        run.events.backward.subscribe(self._follow_loss)
        run.events.clipped.subscribe(self._follow_norm)
        run.events.uneven_steps.subscribe(self._refuse_uneven_steps)
        run.admit_by(self.admits)

    def _refuse_uneven_steps(self) -> None:
        """Refuses `join_uneven_inputs`: all ranks judge each step together, so they must take the same number of steps.

        Raises:
            ConfigError: `anomaly-uneven`, where there are other ranks.
        """
        if self._run.world.size == 1:
            return
        raise ConfigError(
            "anomaly-uneven",
            "anomalies cannot be looked for where ranks take different numbers of steps.",
            why=[
                f"anomalies: {_actions_in_words(self._options)}",
                "`join_uneven_inputs` lets a rank take more steps than another, and all ranks judge each step together",
            ],
            fix="leave `join_uneven_inputs` out, and prepare the loader: it gives every rank as many batches",
        )

    # -- what is known of a step ---------------------------------------------------------------------------------

    def _follow_loss(self, loss: Tensor, share: Tensor, num_items: object) -> None:
        """Records what a backward pass adds to the window's loss, without reading it from the device."""
        if share.numel() != 1:
            return
        self._losses.append((self._run.gradients.last_pass, share.detach()))
        if len(self._losses) > _MOST_LOSSES:
            del self._losses[: _MOST_LOSSES // 2]

    def _follow_norm(self, norm: Tensor) -> None:
        """Records the norm of gradients that were clipped; the norms of several calls in one window are combined."""
        self._norms.append(norm.detach())

    def _facts(self, optimizer: PreparedOptimizer) -> StepFacts:
        """Returns the loss and the gradient norm of the step over all ranks. Ranks: all; each gets the same facts."""
        run = self._run
        # Several optimizers may step after different backward passes. Each is judged by the passes since its own last step.
        shares: list[Tensor] = []
        for backward_pass, share in self._losses:
            if backward_pass.number > optimizer.passes_done:
                shares.append(share * backward_pass.correction)
        loss = torch.full((), math.nan, device=run.device)
        if shares:
            loss = torch.stack([share.reshape(()).float() for share in shares]).sum()
        norm = torch.zeros((), device=run.device)
        takes_norm = bool({"nan", "gradient_norm"} & self._options.action_of.keys())
        if takes_norm:
            norm = self._norm(optimizer)
        self._losses.clear()
        self._norms.clear()
        # This is the only synchronization with the device: loss and norm are read in one transfer.
        own_loss, own_norm = torch.stack([value.float().to(run.device) for value in (loss, norm)]).tolist()
        # One row: whether this rank had a loss, its loss, its norm. `gather` makes it a row for each rank.
        own = torch.tensor([[bool(shares), own_loss, own_norm]], dtype=torch.float64)

        losses: list[float] = []
        norms: list[float] = []
        bad_losses: list[int] = []
        bad_gradients: list[int] = []
        rows = run.collectives.gather(own).tolist()
        for rank, (has_loss, loss_of_rank, norm_of_rank) in enumerate(rows):
            if has_loss:
                losses.append(loss_of_rank)
            if has_loss and not math.isfinite(loss_of_rank):
                bad_losses.append(rank)
            norms.append(norm_of_rank)
            if not math.isfinite(norm_of_rank):
                bad_gradients.append(rank)
        mean_loss: float | None = None
        if losses and not bad_losses and not self._is_partial:
            mean_loss = math.fsum(losses) / len(rows)
        self._is_partial = False
        largest_norm: float | None = None
        if takes_norm and not bad_gradients:
            # Of ranks that take steps of their own (LocalSGD), the largest; elsewhere all are the same.
            largest_norm = max(norms)
        first_bad_rank = min([*bad_losses, *bad_gradients], default=0)
        return StepFacts(mean_loss, largest_norm, len(bad_losses), len(bad_gradients), first_bad_rank)

    def _norm(self, optimizer: PreparedOptimizer) -> Tensor:
        """Returns the norm of the window's gradients: the one that clipping has computed, or a new one."""
        if self._norms:
            # Each call may have clipped other parameters. The norm of all of them is the norm of their norms.
            norms = torch.stack([norm.float().to(self._run.device) for norm in self._norms])
            total: Tensor = torch.linalg.vector_norm(norms)
            return total
        optimizer.unscale()
        return clip_grad_norm(parameters_of(optimizer), math.inf, across=self._run.prepared.across())

    # -- what becomes of it --------------------------------------------------------------------------------------

    def admits(self, optimizer: PreparedOptimizer) -> bool:
        """Returns whether the optimizer may step the gradients of the window that has ended.

        Several optimizers that step after the same backward passes get the same answer.

        Ranks: all; each gets the same answer.

        Raises:
            SystemExit: with `STOPPED`, if the action is to stop.
        """
        passes = self._run.gradients.passes
        if passes == self._reviewed and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            return self._admitted
        facts = self._facts(optimizer)
        if self._run.scaler is not None and not facts.bad_losses:
            # Gradients that overflow in fp16 are no anomaly: the loss scaler skips such a step, and counts it.
            facts = replace(facts, bad_gradients=0)
        anomalies = self._detector(optimizer).judge(facts)
        self._reviewed = passes
        self._stepped = {id(optimizer)}
        self._admitted = self._act(anomalies)
        return self._admitted

    def _detector(self, optimizer: PreparedOptimizer) -> Detector:
        """Returns the detector of an optimizer: optimizers that step in turns have losses and norms of their own."""
        optimizers = self._run.prepared.optimizers
        number = next((place for place, entry in enumerate(optimizers) if entry is optimizer), 0)
        return self._detectors.setdefault(str(number), Detector(self._options))

    def _act(self, anomalies: list[Anomaly]) -> bool:
        """Takes the action of the strongest anomaly of a step. Returns whether the optimizer may step."""
        step = max(optimizer.steps for optimizer in self._run.prepared.optimizers)
        for anomaly in anomalies:
            self.counts[anomaly.kind] += 1
        action, reason = self._possible_action(strongest(anomalies))
        if action in ("no", "log"):
            self._skipped_in_a_row = 0
            done = "The step is taken."
        elif action == "skip":
            self._skipped_in_a_row += 1
            self.counts["skipped"] += 1
            done = "The step is left out."
        elif action == "rollback":
            done = self._go_back()
        else:
            done = "The run stops."
        because = f" ({reason})" if reason else ""
        for anomaly in anomalies:
            self._report(anomaly, step, action, f"Step {step}: {anomaly.text} {done[:-1]}{because}.")
        if action == "stop":
            self._stop(step, anomalies, reason)
        return action in ("no", "log")

    def _possible_action(self, action: str) -> tuple[str, str]:
        """Returns the action to take and, if it is not the one that was asked for, the reason.

        A rollback needs a checkpoint, and after `anomalies.limit` rollbacks, or skipped steps in a row, the run stops.
        """
        limit = self._options.limit
        reason = ""
        if action == "rollback" and self._states.latest is None:
            action = self._options.without_checkpoint
            reason = "the run has neither saved nor loaded a checkpoint that it could go back to"
        if action == "rollback" and self.counts["rollbacks"] >= limit:
            return "stop", f"it has gone back {limit} times, as often as anomalies.limit={limit} allows"
        if action == "skip" and self._skipped_in_a_row >= limit:
            return "stop", f"{limit} steps in a row were left out, as many as anomalies.limit={limit} allows"
        return action, reason

    def _go_back(self) -> str:
        """Loads everything from the newest checkpoint except the positions of the loaders. Ranks: all.

        Returns:
            A sentence that says which samples are left out by that.
        """
        latest = self._states.latest
        assert latest is not None
        counts = {**self.counts, "rollbacks": self.counts["rollbacks"] + 1}
        skipped_in_a_row = self._skipped_in_a_row
        self._states.load(latest.path, only=STATE_KINDS - {"loaders"})
        # The load has restored the statistics of the checkpoint, and with them its counts. The counts of this run must stay:
        # otherwise `anomalies.limit` would never be reached, and the run could go back for ever.
        self.counts = counts
        self._skipped_in_a_row = skipped_in_a_row
        # The gradients are those of the bad step, and must not be added to those of the next one.
        for optimizer in self._run.prepared.optimizers:
            optimizer.leave_out()
        left_out = self._left_out(latest.positions)
        return f"The run went back to {latest.path} (step {latest.step}){left_out}."

    def _left_out(self, positions: Mapping[str, Position]) -> str:
        """Describes the samples between a checkpoint and the current step; "" if no prepared loader gave them."""
        parts = []
        for name, loader in self._states.training_loaders().items():
            begin = positions.get(name, Position())
            end = loader.position
            # `samples` counts those before the position, so that the last one that was read has the number one below it.
            if begin.epoch == end.epoch:
                parts.append(f"samples {begin.samples} to {end.samples - 1} of epoch {end.epoch}")
            else:
                parts.append(
                    f"all from sample {begin.samples} of epoch {begin.epoch} to {end.samples - 1} of {end.epoch}"
                )
        return f" and leaves out {', '.join(parts)}" if parts else ""

    def _report(self, anomaly: Anomaly, step: int, action: str, text: str) -> None:
        """Writes one line to the log and one to the journal, on the main process."""
        value = math.nan if anomaly.value is None else anomaly.value
        what = _JOURNAL_NAMES[anomaly.kind]
        self._run.events.anomaly(StepAnomaly(step, what, value, anomaly.limit, action, text))
        if self._run.world.is_main and action != "stop":
            logger("anomalies").warning("%s", text)

    def _stop(self, step: int, anomalies: list[Anomaly], reason: str) -> NoReturn:
        """Ends the run, after a save in the background has ended. Ranks: all.

        Raises:
            SystemExit: with `STOPPED`.
        """
        why = [anomaly.text for anomaly in anomalies]
        if reason:
            why.append(f"it stops because {reason}")
        problem = Problem(
            "anomaly-stop",
            f"the run stops before step {step}, which had an anomaly.",
            why=why,
            fix="check the batch and the learning rate of this step; resume from the last checkpoint with a lower rate or "
            "without this batch, or set the action to skip or rollback",
        )
        if self._run.world.is_main:
            logger("anomalies").error(
                "%s\nThe exit code is %d; the weights are those of the step before.", problem, STOPPED
            )
        try:
            self._states.wait()
        except CheckpointError as error:
            # It is logged and not raised: the exit code must say that the run stopped because of an anomaly.
            if self._run.world.is_main:
                logger("anomalies").error("the last save in the background failed: %s", error)
        stop = SystemExit(STOPPED)
        # The launcher's last lines are about this exit, and repeat what can be done.
        stop.add_note(f"fix: {problem.fix}")
        raise stop

    # -- in a checkpoint -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the statistics by which the next steps are judged; the same on all ranks."""
        # A window that is saved half-way has only a part of its loss, here and in a run that resumes. Its loss is not judged
        # in either.
        self._is_partial |= self._run.gradients.done > 0
        detectors = {number: detector.state_dict() for number, detector in self._detectors.items()}
        return {"detectors": detectors, "counts": dict(self.counts), "skipped_in_a_row": self._skipped_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self._detectors = {number: Detector(self._options) for number in state["detectors"]}
        for number, detector in self._detectors.items():
            detector.load_state_dict(state["detectors"][number])
        self.counts = {**self.counts, **state["counts"]}
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self._losses.clear()
        self._norms.clear()
        self._is_partial = self._run.gradients.done > 0


def _actions_in_words(options: AnomalyOptions) -> str:
    """Returns the actions that the options ask for, as text."""
    return ", ".join(f"{kind}={action}" for kind, action in options.action_of.items())
