"""What speaks for a cause: `Evidence` of a run, and one predicate for each cause of the table in `diagnose.py`. Pure.

A predicate answers with a sentence that has the numbers in it, or with "" where nothing speaks for its cause. It may count on
those that stand before it in the table having said nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.verify.compare import Difference, Run, Step, first_filler
from paceline.verify.recording import Event

_NEAR = 1e-3  # two factors are the same where they differ by less: a factor of 2 is not due to chance


@dataclass(frozen=True)
class Evidence:
    """What there is to judge one run by.

    Attributes:
        run: under a plan; for what one process does by itself, that process.
        reference: on one process.
        differences: of `run` from `reference`, in order, judged.
        is_repeat: whether `run` is the same as `reference`, run once more.
    """

    run: Run
    reference: Run
    differences: Sequence[Difference] = field(default_factory=list)
    is_repeat: bool = False

    @property
    def first(self) -> Difference | None:
        """The first real difference."""
        return next((difference for difference in self.differences if difference.is_real), None)

    def first_of(self, kind: str) -> Difference | None:
        """The first real difference of one field."""
        return next((d for d in self.differences if d.is_real and d.field == kind), None)

    @property
    def ranks(self) -> int:
        """Processes that read different samples."""
        return self.run.width

    @property
    def step(self) -> Step:
        """The step of `run` with the first real difference."""
        assert self.first is not None
        return self.run.steps[min(self.first.step, len(self.run.steps)) - 1]


# -- a second run on one process differs ---------------------------------------------------------------------------


def unseeded_model(evidence: Evidence) -> str:
    own = evidence.run.values("initial")
    other = evidence.reference.values("initial")
    for event, reference in zip(own, other, strict=False):
        for name, weight in event["weights"].items():
            if weight != reference["weights"].get(name):
                return f"{name} begins with other values in a second run on one process"
    return ""


def unseeded_order(evidence: Evidence) -> str:
    first = evidence.first_of("rows")
    if first is None:
        return ""
    seen = {row for step in evidence.run.steps for row in step.rows}
    others = {row for step in evidence.reference.steps for row in step.rows}
    # Of a part of an epoch, both runs may have seen other samples, but some are the same.
    shared = len(seen & others) / max(1, min(len(seen), len(others)))
    if shared > 0.2:
        return f"step {first.step} reads other samples in a second run; {shared:.0%} of the samples are in both runs"
    return ""


def data_by_clock(evidence: Evidence) -> str:
    first = evidence.first_of("rows")
    if first is None:
        return ""
    return f"no sample of step {first.step} has the same values in a second run"


def unseeded_draws(evidence: Evidence) -> str:
    first = evidence.first
    assert first is not None
    step = evidence.step.by_rank[0]
    reference = evidence.reference.steps[evidence.step.number - 1].by_rank[0]
    changed = [name for name, state in step["random"].items() if state != reference["random"][name]]
    if changed:
        return f"the generator of {' and '.join(changed)} stands elsewhere in a second run at step {first.step}"
    return ""


def nondeterministic_kernel(evidence: Evidence) -> str:
    first = evidence.first
    assert first is not None
    return f"the same rows and weights give another {first.what} at step {first.step}"


# -- what a plan or a width changes ----------------------------------------------------------------------------------


def _all_alike(step: Step) -> bool:
    rows = step.rows_of_rank
    return len(rows) > 1 and bool(rows[0]) and all(sorted(other) == sorted(rows[0]) for other in rows[1:])


def model_unprepared(evidence: Evidence) -> str:
    names = [name for name in evidence.run.steps[0].weights if name.startswith("unprepared")]
    if not names or (evidence.run.values("prepared") and not _drift(evidence.run, names)):
        return ""
    return f"the optimizer steps {len(names)} parameters of a model that `prepare` has never seen"


def _drift(run: Run, names: Sequence[str]) -> bool:
    return any(bool(_unequal(step, "weights", names)) for step in run.steps)


def _unequal(step: Step, kind: str, names: Sequence[str] | None = None) -> str:
    """The first tensor that differs between ranks that both have it."""
    first: dict[str, Sequence[float]] = {}
    for event in step.by_rank:
        for name, value in event[kind].items():
            if names is not None and name not in names:
                continue
            if list(first.setdefault(name, value)) != list(value):
                return str(name)
    return ""


def _samplers(evidence: Evidence) -> list[str]:
    return sorted({name for recording in evidence.run.recordings for name in recording.samplers})


def loader_unprepared(evidence: Evidence) -> str:
    own = [name for name in _samplers(evidence) if name not in ("SequentialSampler", "RandomSampler")]
    if evidence.run.steps and _all_alike(evidence.run.steps[0]) and not own:
        return f"all {evidence.ranks} ranks read the same {len(evidence.run.steps[0].rows_of_rank[0])} rows at step 1"
    return ""


def sampler_ignores_rank(evidence: Evidence) -> str:
    own = [name for name in _samplers(evidence) if name not in ("SequentialSampler", "RandomSampler")]
    if evidence.run.steps and _all_alike(evidence.run.steps[0]):
        return f"{', '.join(own)} gives all {evidence.ranks} ranks the same rows at step 1"
    return ""


def batch_by_rank(evidence: Evidence) -> str:
    first = evidence.first
    assert first is not None
    if first.field != "rows":
        return ""
    rows = int(first.value)
    if rows == int(first.reference) * evidence.ranks and evidence.ranks > 1:
        return (
            f"step {first.step} reads {rows} different rows, {int(first.reference)} on each of {evidence.ranks} ranks: the "
            "script divides the samples itself, so its global batch grows with the ranks"
        )
    return ""


def order_by_width(evidence: Evidence) -> str:
    first = evidence.first
    assert first is not None
    if first.field != "rows" or first.value != first.reference:
        return ""
    elsewhere = {row for step in evidence.reference.steps for row in step.rows}
    rows = evidence.step.rows
    moved = sum(row in elsewhere for row in rows) - len(rows & evidence.reference.steps[first.step - 1].rows)
    if moved > 0:
        return f"{moved} of the {int(first.value)} rows of step {first.step} belong to other steps on one process"
    return ""


def data_by_rank(evidence: Evidence) -> str:
    first = evidence.first
    assert first is not None
    if first.field == "rows" and first.value == first.reference:
        changed = f"{int(first.relative)} of the {int(first.value)} rows of step {first.step}"
        return f"{changed} have other values than on one process"
    return ""


def rows_differ(evidence: Evidence) -> str:
    first = evidence.first
    assert first is not None
    if first.field == "rows":
        return f"step {first.step} reads {int(first.value)} rows, and {int(first.reference)} on one process"
    return ""


def _rates(evidence: Evidence) -> tuple[Difference, float] | None:
    first = evidence.first_of("learning rate")
    return None if first is None else (first, first.ratio)


def _near(value: float, target: float) -> bool:
    return target != 0 and abs(value / target - 1) < _NEAR


def rate_by_ranks(evidence: Evidence) -> str:
    found = _rates(evidence)
    if found is None or found[0].step != 1:
        return ""
    difference, ratio = found
    steps = zip(evidence.run.steps, evidence.reference.steps, strict=False)
    if not all(_near(step.rates[0], ratio * other.rates[0]) for step, other in steps if step.rates and other.rates[0]):
        return ""
    for target, words in ((evidence.ranks, "the number of ranks"), (evidence.ranks**0.5, "its root")):
        if _near(ratio, target) or _near(ratio, 1 / target):
            return f"the learning rate is {difference.value:g}, {ratio:g} times that of one process: {words}"
    return ""


def scheduler_by_process(evidence: Evidence) -> str:
    found = _rates(evidence)
    if found is None:
        return ""
    difference, _ = found
    schedule = [step.rates[:1] for step in evidence.reference.steps]
    later = 1 + (difference.step - 1) * evidence.ranks
    if later <= len(schedule) and schedule[later - 1] and _near(difference.value, schedule[later - 1][0]):
        return (
            f"at step {difference.step} the learning rate is {difference.value:g}: that of step {later} on one process"
        )
    return ""


def rate_differs(evidence: Evidence) -> str:
    found = _rates(evidence)
    if found is None:
        return ""
    difference, ratio = found
    return f"at step {difference.step} the learning rate is {difference.value:g}, {ratio:.4g} times that of one process"


def model_by_width(evidence: Evidence) -> str:
    own = evidence.run.values("initial")
    reference = evidence.reference.values("initial")
    for event, other in zip(own, reference, strict=False):
        for name, weight in event["weights"].items():
            if weight != other["weights"].get(name, weight):
                return f"{name} of rank 0 begins with other values than on one process"
    return ""


def model_by_rank(evidence: Evidence) -> str:
    first = evidence.run.values("initial")
    for recording in evidence.run.recordings[1:]:
        for event, other in zip(recording.of_kind("initial"), first, strict=False):
            for name, weight in event["weights"].items():
                if weight != other["weights"].get(name, weight):
                    return f"{name} of rank {recording.rank} was made with other values; `prepare` has taken those of rank 0"
    return ""


def batch_norm(evidence: Evidence) -> str:
    recording = evidence.run.recordings[0]
    if not recording.batch_norms or evidence.ranks == 1:
        return ""
    step = evidence.step
    unequal = _unequal(step, "buffers")
    if unequal:
        return f"{unequal} differs between ranks at step {step.number}: each uses the statistics of its own rows"
    if recording.batch_norm_statistics == "local":
        return f"the plan leaves the statistics of {recording.batch_norms[0] or 'the model'} to each rank"
    return ""


def random_by_rank(evidence: Evidence) -> str:
    """The generators of ranks part at a step, although they were the same before."""
    recordings = evidence.run.readers
    if len(recordings) < 2:
        return ""
    began = [recording.of_kind("prepared")[-1:] for recording in recordings]
    for step in evidence.run.steps[: evidence.step.number]:
        for name in ("torch", "numpy", "python"):
            states = {event["random"][name] for event in step.by_rank}
            before = {event[0]["random"][name] for event in began if event}
            if len(states) > 1 and len(before) <= 1:
                return f"the generators of {name} stand at other numbers on the ranks from step {step.number} on"
    return ""


def seeds_by_rank(evidence: Evidence) -> str:
    recordings = evidence.run.readers
    first = evidence.first
    assert first is not None
    if first.field != "loss" or len(recordings) < 2:
        return ""
    began = [recording.of_kind("prepared")[-1]["random"] for recording in recordings if recording.of_kind("prepared")]
    steps = [event["random"] for event in evidence.step.by_rank]
    for name in ("torch", "numpy", "python"):
        if len({state[name] for state in began}) > 1 and began and steps[0][name] != began[0][name]:
            return (
                f"the generators of {name} have other seeds on the ranks, and have been drawn from by step {first.step}"
            )
    return ""


def sum_of_rows(evidence: Evidence) -> str:
    first = evidence.first
    assert first is not None
    if first.field == "loss" and evidence.ranks > 1 and _near(first.ratio, 1 / evidence.ranks):
        return f"the loss of step {first.step} is 1/{evidence.ranks} of that of one process"
    return ""


def loss_by_ranks(evidence: Evidence) -> str:
    first = evidence.first
    assert first is not None
    if first.field == "loss" and evidence.ranks > 1 and _near(first.ratio, evidence.ranks):
        return f"the loss of step {first.step} is {evidence.ranks} times that of one process"
    return ""


def _gradient_factor(evidence: Evidence) -> float:
    """The factor that all gradients of the step with the first difference have; 0 where there is none."""
    first = evidence.first
    if first is None or first.field != "gradient":
        return 0.0
    reference = evidence.reference.steps[first.step - 1].gradients
    factors: list[float] = []
    for name, value in evidence.step.gradients.items():
        own = sum(x * y for x, y in zip(value, reference.get(name, ()), strict=False))
        square = sum(y * y for y in reference.get(name, ()))
        if square:
            factors.append(own / square)
    if factors and all(abs(factor - factors[0]) <= _NEAR * abs(factors[0]) for factor in factors):
        return factors[0]
    return 0.0


def gradient_sum(evidence: Evidence) -> str:
    factor = _gradient_factor(evidence)
    if evidence.ranks > 1 and (_near(factor, evidence.ranks) or _near(factor, 1 / evidence.ranks)):
        first = evidence.first
        assert first is not None
        return f"with the same loss, all gradients of step {first.step} are {factor:.4g} times those of one process"
    return ""


def clip_by_part(evidence: Evidence) -> str:
    factor = _gradient_factor(evidence)
    step = evidence.step
    first = evidence.first
    assert first is not None
    if factor:
        return f"with the same loss, all gradients of step {first.step} are {factor:.4g} times those of one process"
    if first.field == "gradient" and (unequal := _unequal(step, "gradients")):
        return f"the gradient of {unequal} differs between ranks at step {first.step} where they are to be the same"
    return ""


def micro_batches(evidence: Evidence) -> str:
    first = evidence.first
    assert first is not None
    own = evidence.step.passes
    other = evidence.reference.steps[first.step - 1].passes
    if own != other:
        return f"step {first.step} takes {own} backward passes on a rank, and {other} on one process"
    return ""


def uneven_mean(evidence: Evidence) -> str:
    first = evidence.first
    assert first is not None
    if first.field != "loss" or evidence.ranks == 1:
        return ""
    return (
        f"with the same rows and weights, the mean of the ranks' losses at step {first.step} is {first.value:.6g}, and the "
        f"loss of one process {first.reference:.6g}"
    )


def weights_by_rank(evidence: Evidence) -> str:
    first = evidence.first
    assert first is not None
    # Gradients that one rank has changed make its weights differ in the same step.
    until = first.step - 1 if first.field == "gradient" else first.step
    for step in evidence.run.steps[:until]:
        if unequal := _unequal(step, "weights"):
            return f"{unequal} differs between ranks after step {step.number}"
    return ""


def metric_padding(evidence: Evidence) -> str:
    batch: Event | None = None
    filler = 0
    for event in evidence.run.recordings[0].events:
        if event["kind"] == "batch":
            batch = event
        elif event["kind"] == "gathered" and event["how"] == "gather" and batch is not None:
            real = sum(batch["rank_rows"])
            if event["got"] == len(batch["rows"]) * evidence.ranks > real:
                filler += event["got"] - real
    return f"`gather` has given {filler} rows that only fill up the last batch" if filler else ""


def _trains_otherwise(evidence: Evidence) -> bool:
    return any(d.is_real and d.field not in ("logged", "gathered") for d in evidence.differences)


def metric_of_rank(evidence: Evidence) -> str:
    first = evidence.first_of("logged")
    if first is None or _trains_otherwise(evidence) or evidence.run.values("gathered"):
        return ""
    return (
        f"{first.name} is {first.value:.6g}, and {first.reference:.6g} on one process; training is the same, and nothing was "
        "gathered"
    )


def metric_of_means(evidence: Evidence) -> str:
    first = evidence.first_of("logged")
    if first is None or _trains_otherwise(evidence):
        return ""
    return f"{first.name} is {first.value:.6g}, and {first.reference:.6g} on one process; training is the same"


def step_itself(evidence: Evidence) -> str:
    first = evidence.first
    assert first is not None
    return f"{first.what} is the first that differs, at step {first.step}"


# -- what a run does by itself -----------------------------------------------------------------------------------------


def weights_stand_still(evidence: Evidence) -> str:
    run = evidence.run
    began = run.values("prepared")
    if not began or len(run.steps) < 1:
        return ""
    stepped = {name for step in run.steps for name in step.weights}
    copies = [name for name in stepped if name.startswith("unprepared")]
    trained = run.recordings[0].trainable
    if copies and trained and not stepped & set(trained):
        return f"the optimizer steps {len(copies)} tensors, none of which is a parameter of the prepared model"
    return ""


def filler_in_training(evidence: Evidence) -> str:
    step = first_filler(evidence.run, evidence.reference)
    if not step:
        return ""
    filler = evidence.run.steps[step - 1].filler
    return f"step {step} also trains on {filler} rows that only fill up its last batch; later steps were not compared"


def evaluates_in_training(evidence: Evidence) -> str:
    recording = evidence.run.recordings[0]
    if not recording.random_layers and not recording.batch_norms:
        return ""
    wrong = [event for event in recording.of_kind("forward") if not event["grad"] and event["training"]]
    if not wrong:
        return ""
    layers = recording.batch_norms or recording.random_layers
    return f"{len(wrong)} forward passes without gradients ran in train mode, through {layers[0] or 'the model'}"


def undivided_accumulation(evidence: Evidence) -> str:
    run = evidence.run
    passes = [step.passes for step in run.steps]
    recording = run.recordings[0]
    if not passes or recording.declared or max(passes) < 2 or any(step.divided for step in run.steps):
        return ""
    if any(step.optimizer for step in run.steps):
        return ""  # of several optimizers, passes are of several losses
    return f"a step adds up the gradients of {max(passes)} losses, none of which was divided"


def unused_accumulation(evidence: Evidence) -> str:
    run = evidence.run
    recording = run.recordings[0]
    if recording.accumulate < 2 or recording.declared or not run.steps or max(step.passes for step in run.steps) > 1:
        return ""
    return f"gradient_accumulation_steps={recording.accumulate}, but the optimizer steps after every backward pass"


def streams_repeat(evidence: Evidence) -> str:
    readers = evidence.run.readers
    if len(readers) < 2:
        return ""
    streams = [[e["stream"] for e in reader.of_kind("forward") if e["stream"]][:1] for reader in readers]
    if not all(streams) or len({stream[0] for stream in streams}) == len(streams):
        return ""
    return f"{len(streams)} ranks with different rows would draw the same dropout masks"
