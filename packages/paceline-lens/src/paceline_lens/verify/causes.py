"""`Evidence` of a run, and the causes that `diagnose` looks for in it. `Verifier` calls it for every run. Pure.

Each cause is a function that returns a sentence with the numbers that indicate it, or "" if nothing does. One that explains a
difference is asked only if those before it have returned "".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline_lens.verify.cause import CauseTable, Diagnosis
from paceline_lens.verify.compare import RecordedRun, RecordedStep, ValueDifference, first_filler
from paceline_lens.verify.recording import Event

# Where the causes of these tables are seen: in a second run on one process, in the script from before, in a run under a plan,
# and in any run, without a comparison.
REPEAT = CauseTable("repeat")
PLAIN = CauseTable("plain")
DIFFERENCE = CauseTable("difference")
ITSELF = CauseTable("itself")
GENERATORS = ("torch", "numpy", "python")
# A rate counts as that of another step if it is so much nearer to that rate than to the one of its own step.
_SMALL_CHANGE = 0.1
_NEAR = 1e-3  # two factors count as equal if they differ by less: a factor that is so close to 2 is no coincidence


@dataclass(frozen=True)
class Evidence:
    """What is known about one run, from which its causes are found.

    Attributes:
        run: the run under a plan, or the reference itself, for causes that one process shows alone.
        reference: the run on one process.
        differences: the differences of `run` from `reference`, in order, each with whether it is real.
        is_repeat: whether `run` is a repetition of `reference`.
        is_plain: whether `reference` is the script from before, on one process.
    """

    run: RecordedRun
    reference: RecordedRun
    differences: Sequence[ValueDifference] = field(default_factory=list)
    is_repeat: bool = False
    is_plain: bool = False

    @property
    def first(self) -> ValueDifference | None:
        """The first real difference."""
        return next((difference for difference in self.differences if difference.is_real), None)

    @property
    def difference(self) -> ValueDifference:
        """The first real difference, for predicates that are asked only if there is one."""
        assert self.first is not None
        return self.first

    def first_of(self, kind: str) -> ValueDifference | None:
        """Returns the first real difference of one field."""
        return next((d for d in self.differences if d.is_real and d.field == kind), None)

    @property
    def ranks(self) -> int:
        """The number of ranks that read different samples."""
        return self.run.width

    @property
    def step(self) -> RecordedStep:
        """The step of `run` with the first real difference."""
        return self.run.steps[min(self.difference.step, len(self.run.steps)) - 1]

    @property
    def reference_step(self) -> RecordedStep:
        """The same step of `reference`."""
        return self.reference.steps[self.difference.step - 1]


def diagnose(evidence: Evidence) -> list[Diagnosis]:
    """Returns what explains the evidence: at most one cause of the difference, and all causes that the run shows by itself."""
    findings: list[Diagnosis] = []
    if evidence.first is not None:
        table = DIFFERENCE
        if evidence.is_repeat:
            table = REPEAT
        elif evidence.is_plain:
            table = PLAIN
        # Only the first one: later causes rely on the earlier ones having found nothing.
        first = next(table.findings(evidence), None)
        if first is not None:
            findings.append(first)
    if not evidence.is_repeat and not evidence.is_plain:
        findings += ITSELF.findings(evidence)
    return findings


# -- a second run on one process differs ---------------------------------------------------------------------------


@REPEAT.add(
    "unseeded-model",
    "The model starts with different weights each time",
    "Call `set_seed(0)` before you create the model.",
)
def unseeded_model(evidence: Evidence) -> str:
    name = _unequal_at_first(evidence.run.values("initial"), evidence.reference.values("initial"))
    return f"{name} begins with other values in a second run on one process" if name else ""


def _unequal_at_first(events: Sequence[Event], references: Sequence[Event]) -> str:
    """Returns the name of the first weight whose initial values differ between two recordings; "" if there is none."""
    for event, reference in zip(events, references, strict=False):
        for name, weight in event["weights"].items():
            if weight != reference["weights"].get(name, weight):
                return str(name)
    return ""


@REPEAT.add(
    "unseeded-order",
    "The order of samples changes from run to run",
    "Do not use the order of a set, a hash, a clock or an unseeded generator: sort samples, and let the loader "
    "shuffle.",
)
def unseeded_order(evidence: Evidence) -> str:
    first = evidence.first_of("rows")
    if first is None:
        return ""
    seen = evidence.run.rows
    others = evidence.reference.rows
    # The runs take only a part of an epoch. If only the order differs, their parts still have some samples in common.
    shared = len(seen & others) / max(1, min(len(seen), len(others)))
    if shared > 0.2:
        return f"step {first.step} reads other samples in a second run; {shared:.0%} of the samples are in both runs"
    return ""


@REPEAT.add(
    "data-by-clock",
    "Samples are changed by something without a seed",
    "Draw the random numbers of augmentation from torch's or numpy's generator in the dataset, or from the index of "
    "the sample and the epoch; not from the time, the process id or `os.urandom`.",
)
def data_by_clock(evidence: Evidence) -> str:
    first = evidence.first_of("rows")
    if first is None:
        return ""
    return f"no sample of step {first.step} has the same values in a second run"


@REPEAT.add(
    "unseeded-draws",
    "Random numbers are drawn without a seed",
    "Call `set_seed(0)` first, and seed your own generators.",
)
def unseeded_draws(evidence: Evidence) -> str:
    first = evidence.difference
    changed = _unequal_generators(evidence.step, evidence.reference_step)
    if changed:
        return f"the generator of {' and '.join(changed)} stands elsewhere in a second run at step {first.step}"
    return ""


def _unequal_generators(step: RecordedStep, other: RecordedStep) -> list[str]:
    """Returns the generators whose states differ after a step."""
    own_states = step.by_rank[0]["random"]
    other_states = other.by_rank[0]["random"]
    return [name for name in GENERATORS if own_states[name] != other_states[name]]


@REPEAT.add(
    "nondeterministic-kernel",
    "The same computation gives a different result",
    "A kernel adds numbers in no fixed order, or a random number has no seed: try `set_seed(0, deterministic=True)`, "
    "which names such kernels.",
)
def nondeterministic_kernel(evidence: Evidence) -> str:
    first = evidence.difference
    return f"the same rows and weights give another {first.what} at step {first.step}"


# -- the script from before differs, on one process -----------------------------------------------------------------


@PLAIN.add(
    "plain-model",
    "The model starts with other weights than in the script from before",
    "Set the same seed in both scripts, and create the model after the same random draws.",
)
def plain_model(evidence: Evidence) -> str:
    plain_weights = [weight for event in evidence.reference.values("initial") for weight in event["weights"].values()]
    for event in evidence.run.values("initial"):
        for name, weight in event["weights"].items():
            if weight not in plain_weights:
                return f"{name} begins with values that no weight of the other script begins with"
    return ""


@PLAIN.add(
    "plain-draws",
    "One of the scripts draws random numbers that the other does not draw",
    "Draw the same numbers in both, or use a generator of your own for those of one script.",
)
def plain_draws(evidence: Evidence) -> str:
    steps = list(zip(evidence.run.steps, evidence.reference.steps, strict=False))
    # Generators that no script seeds stand elsewhere from the beginning; torch's is the one that loaders and layers use.
    first_step, first_plain_step = steps[0]
    unequal_at_first = _unequal_generators(first_step, first_plain_step)
    watched = ["torch", *(name for name in ("numpy", "python") if name not in unequal_at_first)]
    difference = evidence.difference
    for step, plain_step in steps[: difference.step]:
        moved = [name for name in _unequal_generators(step, plain_step) if name in watched]
        # Other samples mean other draws, too: then the draws are the cause only if they came first.
        is_consequence = step.number == difference.step and evidence.first_of("rows") is not None
        if moved and not is_consequence:
            return f"the generator of {' and '.join(moved)} stands elsewhere than in the other script at step {step.number}"
    return ""


@PLAIN.add(
    "plain-samples",
    "A step reads other samples than in the script from before",
    "Give both loaders the same data, batch size and order, and draw nothing before the loop in one script only.",
)
def plain_samples(evidence: Evidence) -> str:
    first = evidence.first_of("rows")
    if first is None:
        return ""
    shared = len(evidence.run.rows & evidence.reference.rows) / max(1, len(evidence.reference.rows))
    return (
        f"the model is called with {first.value:.0f} rows in place of {first.reference:.0f} at step {first.step}; "
        f"{shared:.0%} of all rows are in both runs"
    )


@PLAIN.add(
    "plain-rate",
    "The learning rate is not that of the script from before",
    "Set the same rate, and step the scheduler as often as before: after each optimizer step, or once in each epoch.",
)
def plain_rate(evidence: Evidence) -> str:
    first = evidence.difference
    if first.field != "learning rate":
        return ""
    return f"it is {first.value:.6g} in place of {first.reference:.6g} at step {first.step}"


@PLAIN.add(
    "plain-computation",
    "The same samples and weights give another result than in the script from before",
    "Compare what both loops do in this step: the loss, the division by micro-batches, clipping, the optimizer's "
    "options, and where gradients are cleared.",
)
def plain_computation(evidence: Evidence) -> str:
    first = evidence.difference
    return f"the {first.what} is the first to differ, at step {first.step}"


# -- what a plan or a width changes ----------------------------------------------------------------------------------


def _all_alike(step: RecordedStep) -> bool:
    rows = step.rows_of_rank
    return len(rows) > 1 and bool(rows[0]) and all(sorted(other) == sorted(rows[0]) for other in rows[1:])


def _near(value: float, target: float) -> bool:
    return target != 0 and abs(value / target - 1) < _NEAR


# The run under a plan starts differently, or reads other samples.
@DIFFERENCE.add(
    "model-unprepared",
    "The model was not prepared",
    "Use what `prepare` returns: `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`.",
)
def model_unprepared(evidence: Evidence) -> str:
    names = [name for name in evidence.run.steps[0].weights if name.startswith("unprepared")]
    if not names:
        return ""
    drifts = any(_unequal(step, "weights", names) for step in evidence.run.steps)
    if evidence.run.values("prepared") and not drifts:
        return ""
    return f"the optimizer steps {len(names)} parameters of a model that `prepare` has never seen"


def _unequal(step: RecordedStep, kind: str, names: Sequence[str] | None = None) -> str:
    """Returns the name of the first tensor that differs between ranks that have it; "" if there is none."""
    first: dict[str, Sequence[float]] = {}
    for event in step.by_rank:
        for name, value in event[kind].items():
            if names is not None and name not in names:
                continue
            if list(first.setdefault(name, value)) != list(value):
                return str(name)
    return ""


def _own_samplers(evidence: Evidence) -> list[str]:
    """Returns the classes of samplers that the script chose itself, other than those of an ordinary `DataLoader`."""
    names: set[str] = set()
    for recording in evidence.run.recordings:
        names.update(recording.samplers)
    return sorted(names - {"SequentialSampler", "RandomSampler"})


@DIFFERENCE.add(
    "model-by-width",
    "The model starts with other weights than on one process",
    "Call `set_seed(0)`, without the rank or the number of ranks, before you create the model.",
)
def model_by_width(evidence: Evidence) -> str:
    name = _unequal_at_first(evidence.run.values("initial"), evidence.reference.values("initial"))
    return f"{name} of rank 0 begins with other values than on one process" if name else ""


@DIFFERENCE.add(
    "loader-unprepared",
    "The loader was not prepared: all ranks read the same samples",
    "Prepare it, and loop over the result: `loader = accelerator.prepare(loader)`.",
)
def loader_unprepared(evidence: Evidence) -> str:
    if evidence.run.steps and _all_alike(evidence.run.steps[0]) and not _own_samplers(evidence):
        return f"all {evidence.ranks} ranks read the same {len(evidence.run.steps[0].rows_of_rank[0])} rows at step 1"
    return ""


@DIFFERENCE.add(
    "sampler-ignores-rank",
    "A sampler gives all ranks the same samples",
    "Let `accelerator.prepare(loader)` divide the samples, or give the sampler the rank and the number of ranks.",
)
def sampler_ignores_rank(evidence: Evidence) -> str:
    if evidence.run.steps and _all_alike(evidence.run.steps[0]):
        return f"{', '.join(_own_samplers(evidence))} gives all {evidence.ranks} ranks the same rows at step 1"
    return ""


@DIFFERENCE.add(
    "batch-by-rank",
    "The global batch grows with the number of ranks",
    "Let `prepare` divide the loader's batch, or divide the batch size by the number of ranks. If the batch should "
    "grow, then different numbers are correct, and there is nothing to change.",
)
def batch_by_rank(evidence: Evidence) -> str:
    first = evidence.difference
    if first.field != "rows":
        return ""
    rows = int(first.value)
    if rows == int(first.reference) * evidence.ranks and evidence.ranks > 1:
        return (
            f"step {first.step} reads {rows} different rows, {int(first.reference)} on each of {evidence.ranks} ranks: the "
            "script divides the samples itself, so its global batch grows with the ranks"
        )
    return ""


@DIFFERENCE.add(
    "order-by-width",
    "Samples come in another order than on one process",
    "Do not seed the order by the rank or the number of ranks; call `set_seed(0)` with the same seed on all.",
)
def order_by_width(evidence: Evidence) -> str:
    first = evidence.difference
    if first.field != "rows" or first.value != first.reference:
        return ""
    rows = evidence.step.rows
    known_rows = evidence.reference.rows.intersection(rows)
    moved = len(known_rows) - len(rows & evidence.reference_step.rows)
    if moved > 0:
        return f"{moved} of the {int(first.value)} rows of step {first.step} belong to other steps on one process"
    return ""


@DIFFERENCE.add(
    "data-by-rank",
    "Samples have other values on some ranks",
    "Augmentation must not depend on the rank, or on how many samples this process has read: seed it by the index of "
    "the sample, or do it in the workers of a prepared loader.",
)
def data_by_rank(evidence: Evidence) -> str:
    first = evidence.difference
    if first.field == "rows" and first.value == first.reference:
        changed = f"{int(first.relative)} of the {int(first.value)} rows of step {first.step}"
        return f"{changed} have other values than on one process"
    return ""


@DIFFERENCE.add(
    "micro-batches-by-rank",
    "A step has another number of micro-batches",
    "Do not divide the number of micro-batches by the ranks; use `gradient_accumulation_steps` and `accumulate`.",
)
def micro_batches(evidence: Evidence) -> str:
    own = evidence.step.passes
    other = evidence.reference_step.passes
    if own != other:
        return f"step {evidence.difference.step} takes {own} backward passes on a rank, and {other} on one process"
    return ""


@DIFFERENCE.add(
    "rows-differ",
    "A step reads other samples",
    "Do not skip or select batches by the rank; let `prepare` divide them.",
)
def rows_differ(evidence: Evidence) -> str:
    first = evidence.difference
    if first.field == "rows":
        return f"step {first.step} reads {int(first.value)} rows, and {int(first.reference)} on one process"
    return ""


# With the same samples, the learning rate differs.
@DIFFERENCE.add(
    "scheduler-by-process",
    "The scheduler steps once for each process",
    "Call its `step` once after each optimizer step, without a loop over processes; prepare it.",
)
def scheduler_by_process(evidence: Evidence) -> str:
    difference = evidence.first_of("learning rate")
    if difference is None:
        return ""
    # A scheduler that steps once for each process has taken `ranks` times as many steps by then.
    later = 1 + (difference.step - 1) * evidence.ranks
    if later > len(evidence.reference.steps) or not evidence.reference.steps[later - 1].rates:
        return ""
    expected = evidence.reference.steps[later - 1].rates[0]
    # In the first steps of a long schedule all rates are nearly the same.
    is_apart = abs(difference.value - expected) < _SMALL_CHANGE * abs(difference.reference - expected)
    if is_apart and _near(difference.value, expected):
        return (
            f"at step {difference.step} the learning rate is {difference.value:g}: that of step {later} on one process"
        )
    return ""


@DIFFERENCE.add(
    "rate-by-ranks",
    "The learning rate is multiplied by the number of ranks",
    "Set it for the global batch, which does not change with the ranks here.",
)
def rate_by_ranks(evidence: Evidence) -> str:
    difference = evidence.first_of("learning rate")
    if difference is None or difference.step != 1:
        return ""
    ratio = difference.ratio
    # The rate of every step must have the same factor: a schedule could have it at the first step by chance.
    for step, other in zip(evidence.run.steps, evidence.reference.steps, strict=False):
        if not step.rates or not other.rates or other.rates[0] == 0:
            continue
        if not _near(step.rates[0], ratio * other.rates[0]):
            return ""
    for target, words in ((evidence.ranks, "the number of ranks"), (evidence.ranks**0.5, "its root")):
        if _near(ratio, target) or _near(ratio, 1 / target):
            return f"the learning rate is {difference.value:g}, {ratio:g} times that of one process: {words}"
    return ""


@DIFFERENCE.add(
    "rate-differs",
    "The learning rate follows another schedule",
    "Build the schedule from `len(prepared_loader)`, in optimizer steps.",
)
def rate_differs(evidence: Evidence) -> str:
    difference = evidence.first_of("learning rate")
    if difference is None:
        return ""
    times = f"{difference.ratio:.4g} times that of one process"
    return f"at step {difference.step} the learning rate is {difference.value:g}, {times}"


# With the same samples and learning rate, the loss differs.
@DIFFERENCE.add(
    "batch-norm-by-rank",
    "Batch norm uses the statistics of the samples of each rank",
    "Let the plan combine them: `--option batch_norm.statistics=synced`.",
)
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


@DIFFERENCE.add(
    "sum-of-rows",
    "The loss is a sum over the samples of the rank",
    "Use `reduction='mean'`, or `accelerator.backward(loss, num_items=n)` with the number of items that it sums over.",
)
def sum_of_rows(evidence: Evidence) -> str:
    first = evidence.difference
    if first.field == "loss" and evidence.ranks > 1 and _near(first.ratio, 1 / evidence.ranks):
        return f"the loss of step {first.step} is 1/{evidence.ranks} of that of one process"
    return ""


@DIFFERENCE.add(
    "loss-by-ranks",
    "The loss is multiplied by the number of ranks",
    "Pass the mean over the samples of this rank to `backward`; Paceline averages the gradients.",
)
def loss_by_ranks(evidence: Evidence) -> str:
    first = evidence.difference
    if first.field == "loss" and evidence.ranks > 1 and _near(first.ratio, evidence.ranks):
        return f"the loss of step {first.step} is {evidence.ranks} times that of one process"
    return ""


def _gradient_factor(evidence: Evidence) -> float:
    """Returns the factor by which all gradients of the step with the first difference differ; 0 if there is no such factor."""
    first = evidence.first
    if first is None or first.field != "gradient":
        return 0.0
    factors: list[float] = []
    for name, value in evidence.step.gradients.items():
        reference = evidence.reference_step.gradients.get(name, ())
        # The factor with the smallest square error: the projection of the gradient on that of the reference.
        product = sum(x * y for x, y in zip(value, reference, strict=False))
        square = sum(y * y for y in reference)
        if square:
            factors.append(product / square)
    if not factors:
        return 0.0
    first_factor = factors[0]
    tolerance = _NEAR * abs(first_factor)
    is_common = all(abs(factor - first_factor) <= tolerance for factor in factors)
    return first_factor if is_common else 0.0


@DIFFERENCE.add(
    "draws-in-forward",
    "The forward pass draws random numbers, which differ for each number of processes",
    "This may be right (noise, stochastic depth, sampling), but it cannot be compared: turn it off while you verify, "
    "for example by a rate of 0.",
    is_error=False,
)
def draws_in_forward(evidence: Evidence) -> str:
    first = evidence.difference
    draws = evidence.step.draws
    if evidence.ranks == 1 or first.field != "loss" or not draws:
        return ""
    # Where ranks have other seeds, a number that all rows share may have been drawn: then that is the mistake.
    if "torch" not in draws and _seeds_differ(evidence, draws):
        return ""
    return f"the forward pass of step {first.step} draws from the generator of {' and '.join(draws)}"


def _seeds_differ(evidence: Evidence, names: Sequence[str]) -> bool:
    """Returns whether one of these generators began with different states on the ranks."""
    at_first = _random_at_first(evidence)
    for name in names:
        states = {random[name] for random in at_first}
        if len(states) > 1:
            return True
    return False


def _random_at_first(evidence: Evidence) -> list[dict[str, str]]:
    """Returns the states of the generators after `prepare`, for each rank that reads rows of its own."""
    generators: list[dict[str, str]] = []
    for reader in evidence.run.readers:
        prepared = reader.of_kind("prepared")
        if prepared:
            generators.append(prepared[-1]["random"])
    return generators


@DIFFERENCE.add(
    "draws-by-rank",
    "Some ranks draw random numbers that others do not draw",
    "Draw on all ranks, or use a separate generator under `if accelerator.is_main_process`.",
)
def random_by_rank(evidence: Evidence) -> str:
    # Generators with different seeds differ at every step, which says nothing: see `seeds_by_rank`.
    if evidence.ranks < 2:
        return ""
    same_seed = [name for name in GENERATORS if not _seeds_differ(evidence, [name])]
    for step in evidence.run.steps[: evidence.step.number]:
        for name in same_seed:
            states = {event["random"][name] for event in step.by_rank}
            if len(states) > 1:
                return f"the generators of {name} stand at other numbers on the ranks from step {step.number} on"
    return ""


@DIFFERENCE.add(
    "seeds-by-rank",
    "Ranks draw different random numbers for values that they should share",
    "Use the same seed on all ranks, or draw such numbers on one rank and broadcast them.",
)
def seeds_by_rank(evidence: Evidence) -> str:
    first = evidence.difference
    if first.field != "loss" or evidence.ranks < 2:
        return ""
    for name in GENERATORS:
        if not _seeds_differ(evidence, [name]):
            continue
        was_used = evidence.step.by_rank[0]["random"][name] != _random_at_first(evidence)[0][name]
        if was_used:
            return (
                f"the generators of {name} have other seeds on the ranks, and have been drawn from by step {first.step}"
            )
    return ""


@DIFFERENCE.add(
    "weights-by-rank",
    "The weights of the ranks have become different",
    "Change weights in the same way on all ranks, and only with the prepared optimizer.",
)
def weights_by_rank(evidence: Evidence) -> str:
    first = evidence.difference
    # If gradients differ first, the weights of the same step differ because of them, and are no cause.
    last = first.step - 1 if first.field == "gradient" else first.step
    for step in evidence.run.steps[:last]:
        unequal = _unequal(step, "weights")
        if unequal:
            return f"{unequal} differs between ranks after step {step.number}"
    return ""


@DIFFERENCE.add(
    "mean-of-means",
    "The loss is not a mean over samples, so it differs from the mean of the losses of the ranks",
    "If it is a mean over tokens or masked items, sum it and call `accelerator.backward(loss, num_items=n)`; if "
    "samples are compared with each other, gather them first.",
)
def uneven_mean(evidence: Evidence) -> str:
    first = evidence.difference
    if first.field != "loss" or evidence.ranks == 1:
        return ""
    return (
        f"with the same rows and weights, the mean of the ranks' losses at step {first.step} is {first.value:.6g}, and the "
        f"loss of one process {first.reference:.6g}"
    )


# With the same loss, the gradients differ.
@DIFFERENCE.add(
    "gradient-sum",
    "Gradients are summed over ranks, and not averaged",
    "`accelerator.backward(loss)` averages them: remove your own all-reduce, or divide by the number of ranks.",
)
def gradient_sum(evidence: Evidence) -> str:
    factor = _gradient_factor(evidence)
    is_of_ranks = _near(factor, evidence.ranks) or _near(factor, 1 / evidence.ranks)
    if evidence.ranks > 1 and is_of_ranks:
        return _all_gradients(evidence, factor)
    return ""


def _all_gradients(evidence: Evidence, factor: float) -> str:
    step = evidence.difference.step
    return f"with the same loss, all gradients of step {step} are {factor:.4g} times those of one process"


@DIFFERENCE.add(
    "clip-by-part",
    "Gradients are changed by a value of one rank",
    "Clip with `accelerator.clip_grad_norm_(model.parameters(), 1.0)`, which takes the norm over all ranks, after "
    "unscaling.",
)
def clip_by_part(evidence: Evidence) -> str:
    factor = _gradient_factor(evidence)
    if factor:
        return _all_gradients(evidence, factor)
    first = evidence.difference
    if first.field != "gradient":
        return ""
    unequal = _unequal(evidence.step, "gradients")
    if not unequal:
        return ""
    return f"the gradient of {unequal} differs between ranks at step {first.step} where they are to be the same"


# With the same training, a logged value differs.
@DIFFERENCE.add(
    "metric-of-one-rank",
    "A logged value is that of one rank",
    "Gather first: `accelerator.gather_for_metrics(values)`, or `accelerator.reduce(value, 'mean')`.",
)
def metric_of_rank(evidence: Evidence) -> str:
    sentence = metric_of_means(evidence)
    if not sentence or evidence.run.values("gathered"):
        return ""
    return f"{sentence}, and nothing was gathered"


@DIFFERENCE.add(
    "metric-of-means",
    "A logged value is a mean over ranks with different numbers of samples",
    "Gather sums and counts, or the values of all samples, and divide once.",
)
def metric_of_means(evidence: Evidence) -> str:
    first = evidence.first_of("logged")
    if first is None:
        return ""
    for difference in evidence.differences:
        if difference.is_real and difference.field not in ("logged", "gathered"):
            return ""  # training differs too, which explains the logged value
    return f"{first.name} is {first.value:.6g}, and {first.reference:.6g} on one process; training is the same"


# It always has evidence, and so it must be the last of the causes of a difference.
@DIFFERENCE.add("unknown", "No cause in the table fits", "Look at what happens to the named tensor in the named step.")
def step_itself(evidence: Evidence) -> str:
    first = evidence.difference
    return f"{first.what} is the first that differs, at step {first.step}"


# -- what a run does by itself -----------------------------------------------------------------------------------------


@ITSELF.add(
    "metric-over-padding",
    "A metric counts samples that only fill the last batch",
    "Gather with `accelerator.gather_for_metrics(...)`, which leaves these samples out.",
)
def metric_padding(evidence: Evidence) -> str:
    batch: Event | None = None
    filler = 0
    for event in evidence.run.recordings[0].events:
        if event["kind"] == "batch":
            batch = event
        elif event["kind"] == "gathered" and event["how"] == "gather" and batch is not None:
            real_rows = sum(batch["rank_rows"])
            padded_rows = len(batch["rows"]) * evidence.ranks
            # Other calls gather something else than one value for each row of the batch.
            if event["num_rows"] == padded_rows and padded_rows > real_rows:
                filler += padded_rows - real_rows
    return f"`gather` has given {filler} rows that only fill up the last batch" if filler else ""


@ITSELF.add(
    "optimizer-of-copies",
    "The optimizer updates copies of the parameters",
    "Create it from `model.parameters()` of the same model that is prepared.",
)
def weights_stand_still(evidence: Evidence) -> str:
    run = evidence.run
    if not run.values("prepared"):
        return ""
    stepped: set[str] = set()
    for step in run.steps:
        stepped.update(step.weights)
    copies = [name for name in stepped if name.startswith("unprepared")]
    trainable = run.recordings[0].trainable
    if copies and trainable and stepped.isdisjoint(trainable):
        return f"the optimizer steps {len(copies)} tensors, none of which is a parameter of the prepared model"
    return ""


@ITSELF.add(
    "evaluation-in-train-mode",
    "Evaluation runs in train mode",
    "Call `model.eval()` before evaluating and `model.train()` after it.",
)
def evaluates_in_training(evidence: Evidence) -> str:
    recording = evidence.run.recordings[0]
    if not recording.random_layers and not recording.batch_norms:
        return ""
    in_train_mode = [event for event in recording.of_kind("forward") if not event["grad"] and event["training"]]
    if not in_train_mode:
        return ""
    layers = recording.batch_norms or recording.random_layers
    layer = layers[0] or "the model"
    return f"{len(in_train_mode)} forward passes without gradients ran in train mode, through {layer}"


@ITSELF.add(
    "undivided-accumulation",
    "Accumulated losses are not divided by their number",
    "Use `gradient_accumulation_steps` and `with accelerator.accumulate(model)`, or divide each loss.",
)
def undivided_accumulation(evidence: Evidence) -> str:
    run = evidence.run
    most_passes = max((step.passes for step in run.steps), default=0)
    if most_passes < 2 or run.recordings[0].declared:
        return ""
    for step in run.steps:
        # With several optimizers, as of a GAN, the backward passes may belong to different losses.
        if step.divided or step.optimizer:
            return ""
    return f"a step adds up the gradients of {most_passes} losses, none of which was divided"


@ITSELF.add(
    "unused-accumulation",
    "Every micro-batch is a step, although accumulation is set",
    "Put the body of the loop in `with accelerator.accumulate(model):`.",
)
def unused_accumulation(evidence: Evidence) -> str:
    run = evidence.run
    recording = run.recordings[0]
    if recording.accumulate < 2 or recording.declared or not run.steps:
        return ""
    if max(step.passes for step in run.steps) > 1:
        return ""
    return f"gradient_accumulation_steps={recording.accumulate}, but the optimizer steps after every backward pass"


@ITSELF.add(
    "filler-in-training",
    "The model is trained on samples that only fill the last batch",
    "To compare more, choose a batch size that divides the samples, or `drop_last=True`.",
    is_error=False,
)
def filler_in_training(evidence: Evidence) -> str:
    step = first_filler(evidence.run, evidence.reference)
    if not step:
        return ""
    filler = evidence.run.steps[step - 1].filler
    return f"step {step} also trains on {filler} rows that only fill up its last batch; later steps were not compared"


@ITSELF.add(
    "model-by-rank",
    "Ranks create models with different weights",
    "Call `set_seed(0)`, without the rank, before you create the model, and `set_seed(0, device_specific=True)` after "
    "it.",
    is_error=False,
)
def model_by_rank(evidence: Evidence) -> str:
    first = evidence.run.values("initial")
    for recording in evidence.run.recordings[1:]:
        name = _unequal_at_first(recording.of_kind("initial"), first)
        if name:
            return f"{name} of rank {recording.rank} was made with other values; `prepare` has taken those of rank 0"
    return ""


@ITSELF.add(
    "dropout-repeats",
    "Ranks draw the same dropout masks",
    "Call `set_seed(0, device_specific=True)` after the model is created.",
    is_error=False,
)
def streams_repeat(evidence: Evidence) -> str:
    readers = evidence.run.readers
    if len(readers) < 2:
        return ""
    first_streams: list[str] = []  # for each rank, the state of its generator at the first dropout
    for reader in readers:
        streams = [event["stream"] for event in reader.of_kind("forward") if event["stream"]]
        if not streams:
            return ""
        first_streams.append(streams[0])
    if len(set(first_streams)) == len(first_streams):
        return ""
    return f"{len(first_streams)} ranks with different rows would draw the same dropout masks"


CAUSES = (*REPEAT, *PLAIN, *DIFFERENCE, *ITSELF)
