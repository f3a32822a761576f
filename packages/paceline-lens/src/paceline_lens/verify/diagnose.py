"""`diagnose` finds the causes of a difference in the table `CAUSES`. `Verifier` calls it for every run. Pure.

An entry of the table has a name, a title, a fix, and a predicate of `predicates.py` that looks for evidence. The order of the
table matters: if several causes of a difference fit, the first one counts. A cause that has others as its consequences comes
before them: unequal samples, for example, also make losses and gradients unequal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from paceline_lens.verify import predicates
from paceline_lens.verify.predicates import Evidence

Kind = Literal["difference", "repeat", "plain", "itself", "ranks"]


@dataclass(frozen=True)
class DifferenceCause:
    """One entry of the table.

    Attributes:
        name: a stable name, for tests and scripts.
        title: the cause in one line.
        fix: what to do, in one or two sentences.
        evidence_for: returns a sentence with the evidence, or "" if there is none.
        explains: "difference" for a difference from the run on one process, "repeat" for a difference between two runs on one
            process, "plain" for a difference from the script from before, "itself" for a mistake that one run shows without
            any comparison, and "ranks" for scripts without Paceline (`bare/causes.py`).
        is_error: whether the numbers are wrong; otherwise it is a note.
    """

    name: str
    title: str
    fix: str
    evidence_for: Callable[..., str]
    explains: Kind = "difference"
    is_error: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """A cause with the sentence that is the evidence for it."""

    cause: DifferenceCause
    evidence: str


def diagnose(evidence: Evidence) -> list[Diagnosis]:
    """Returns what explains the evidence: at most one cause of the difference, and all causes that the run shows by itself."""
    findings: list[Diagnosis] = []
    if evidence.first is not None:
        kind: Kind = "difference"
        if evidence.is_repeat:
            kind = "repeat"
        elif evidence.is_plain:
            kind = "plain"
        # Only the first one: later predicates rely on the earlier ones having found nothing.
        first = next(_findings(evidence, kind), None)
        if first is not None:
            findings.append(first)
    if not evidence.is_repeat and not evidence.is_plain:
        findings += _findings(evidence, "itself")
    return findings


def _findings(evidence: Evidence, kind: Kind) -> Iterator[Diagnosis]:
    """Yields the causes of one kind for which there is evidence, in the order of the table."""
    for cause in CAUSES:
        if cause.explains == kind:
            sentence = cause.evidence_for(evidence)
            if sentence:
                yield Diagnosis(cause, sentence)


CAUSES: tuple[DifferenceCause, ...] = (
    # A second run on one process differs.
    DifferenceCause(
        "unseeded-model",
        "The model starts with different weights each time",
        "Call `set_seed(0)` before you create the model.",
        predicates.unseeded_model,
        explains="repeat",
    ),
    DifferenceCause(
        "unseeded-order",
        "The order of samples changes from run to run",
        "Do not use the order of a set, a hash, a clock or an unseeded generator: sort samples, and let the loader shuffle.",
        predicates.unseeded_order,
        explains="repeat",
    ),
    DifferenceCause(
        "data-by-clock",
        "Samples are changed by something without a seed",
        "Draw the random numbers of augmentation from torch's or numpy's generator in the dataset, or from the index of the "
        "sample and the epoch; not from the time, the process id or `os.urandom`.",
        predicates.data_by_clock,
        explains="repeat",
    ),
    DifferenceCause(
        "unseeded-draws",
        "Random numbers are drawn without a seed",
        "Call `set_seed(0)` first, and seed your own generators.",
        predicates.unseeded_draws,
        explains="repeat",
    ),
    DifferenceCause(
        "nondeterministic-kernel",
        "The same computation gives a different result",
        "A kernel adds numbers in no fixed order, or a random number has no seed: try `set_seed(0, deterministic=True)`, "
        "which names such kernels.",
        predicates.nondeterministic_kernel,
        explains="repeat",
    ),
    # The script from before differs, on one process.
    DifferenceCause(
        "plain-model",
        "The model starts with other weights than in the script from before",
        "Set the same seed in both scripts, and create the model after the same random draws.",
        predicates.plain_model,
        explains="plain",
    ),
    DifferenceCause(
        "plain-draws",
        "One of the scripts draws random numbers that the other does not draw",
        "Draw the same numbers in both, or use a generator of your own for those of one script.",
        predicates.plain_draws,
        explains="plain",
    ),
    DifferenceCause(
        "plain-samples",
        "A step reads other samples than in the script from before",
        "Give both loaders the same data, batch size and order, and draw nothing before the loop in one script only.",
        predicates.plain_samples,
        explains="plain",
    ),
    DifferenceCause(
        "plain-rate",
        "The learning rate is not that of the script from before",
        "Set the same rate, and step the scheduler as often as before: after each optimizer step, or once in each epoch.",
        predicates.plain_rate,
        explains="plain",
    ),
    DifferenceCause(
        "plain-computation",
        "The same samples and weights give another result than in the script from before",
        "Compare what both loops do in this step: the loss, the division by micro-batches, clipping, the optimizer's options, "
        "and where gradients are cleared.",
        predicates.plain_computation,
        explains="plain",
    ),
    # The run under a plan starts differently, or reads other samples.
    DifferenceCause(
        "model-unprepared",
        "The model was not prepared",
        "Use what `prepare` returns: `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`.",
        predicates.model_unprepared,
    ),
    DifferenceCause(
        "model-by-width",
        "The model starts with other weights than on one process",
        "Call `set_seed(0)`, without the rank or the number of ranks, before you create the model.",
        predicates.model_by_width,
    ),
    DifferenceCause(
        "loader-unprepared",
        "The loader was not prepared: all ranks read the same samples",
        "Prepare it, and loop over the result: `loader = accelerator.prepare(loader)`.",
        predicates.loader_unprepared,
    ),
    DifferenceCause(
        "sampler-ignores-rank",
        "A sampler gives all ranks the same samples",
        "Let `accelerator.prepare(loader)` divide the samples, or give the sampler the rank and the number of ranks.",
        predicates.sampler_ignores_rank,
    ),
    DifferenceCause(
        "batch-by-rank",
        "The global batch grows with the number of ranks",
        "Let `prepare` divide the loader's batch, or divide the batch size by the number of ranks. If the batch should "
        "grow, then different numbers are correct, and there is nothing to change.",
        predicates.batch_by_rank,
    ),
    DifferenceCause(
        "order-by-width",
        "Samples come in another order than on one process",
        "Do not seed the order by the rank or the number of ranks; call `set_seed(0)` with the same seed on all.",
        predicates.order_by_width,
    ),
    DifferenceCause(
        "data-by-rank",
        "Samples have other values on some ranks",
        "Augmentation must not depend on the rank, or on how many samples this process has read: seed it by the index of the "
        "sample, or do it in the workers of a prepared loader.",
        predicates.data_by_rank,
    ),
    DifferenceCause(
        "micro-batches-by-rank",
        "A step has another number of micro-batches",
        "Do not divide the number of micro-batches by the ranks; use `gradient_accumulation_steps` and `accumulate`.",
        predicates.micro_batches,
    ),
    DifferenceCause(
        "rows-differ",
        "A step reads other samples",
        "Do not skip or select batches by the rank; let `prepare` divide them.",
        predicates.rows_differ,
    ),
    # With the same samples, the learning rate differs.
    DifferenceCause(
        "scheduler-by-process",
        "The scheduler steps once for each process",
        "Call its `step` once after each optimizer step, without a loop over processes; prepare it.",
        predicates.scheduler_by_process,
    ),
    DifferenceCause(
        "rate-by-ranks",
        "The learning rate is multiplied by the number of ranks",
        "Set it for the global batch, which does not change with the ranks here.",
        predicates.rate_by_ranks,
    ),
    DifferenceCause(
        "rate-differs",
        "The learning rate follows another schedule",
        "Build the schedule from `len(prepared_loader)`, in optimizer steps.",
        predicates.rate_differs,
    ),
    # With the same samples and learning rate, the loss differs.
    DifferenceCause(
        "batch-norm-by-rank",
        "Batch norm uses the statistics of the samples of each rank",
        "Let the plan combine them: `--option batch_norm.statistics=synced`.",
        predicates.batch_norm,
    ),
    DifferenceCause(
        "sum-of-rows",
        "The loss is a sum over the samples of the rank",
        "Use `reduction='mean'`, or `accelerator.backward(loss, num_items=n)` with the number of items that it sums over.",
        predicates.sum_of_rows,
    ),
    DifferenceCause(
        "loss-by-ranks",
        "The loss is multiplied by the number of ranks",
        "Pass the mean over the samples of this rank to `backward`; Paceline averages the gradients.",
        predicates.loss_by_ranks,
    ),
    DifferenceCause(
        "draws-in-forward",
        "The forward pass draws random numbers, which differ for each number of processes",
        "This may be right (noise, stochastic depth, sampling), but it cannot be compared: turn it off while you verify, for "
        "example by a rate of 0.",
        predicates.draws_in_forward,
        is_error=False,
    ),
    DifferenceCause(
        "draws-by-rank",
        "Some ranks draw random numbers that others do not draw",
        "Draw on all ranks, or use a separate generator under `if accelerator.is_main_process`.",
        predicates.random_by_rank,
    ),
    DifferenceCause(
        "seeds-by-rank",
        "Ranks draw different random numbers for values that they should share",
        "Use the same seed on all ranks, or draw such numbers on one rank and broadcast them.",
        predicates.seeds_by_rank,
    ),
    DifferenceCause(
        "weights-by-rank",
        "The weights of the ranks have become different",
        "Change weights in the same way on all ranks, and only with the prepared optimizer.",
        predicates.weights_by_rank,
    ),
    DifferenceCause(
        "mean-of-means",
        "The loss is not a mean over samples, so it differs from the mean of the losses of the ranks",
        "If it is a mean over tokens or masked items, sum it and call `accelerator.backward(loss, num_items=n)`; if samples "
        "are compared with each other, gather them first.",
        predicates.uneven_mean,
    ),
    # With the same loss, the gradients differ.
    DifferenceCause(
        "gradient-sum",
        "Gradients are summed over ranks, and not averaged",
        "`accelerator.backward(loss)` averages them: remove your own all-reduce, or divide by the number of ranks.",
        predicates.gradient_sum,
    ),
    DifferenceCause(
        "clip-by-part",
        "Gradients are changed by a value of one rank",
        "Clip with `accelerator.clip_grad_norm_(model.parameters(), 1.0)`, which takes the norm over all ranks, after "
        "unscaling.",
        predicates.clip_by_part,
    ),
    # With the same training, a logged value differs.
    DifferenceCause(
        "metric-of-one-rank",
        "A logged value is that of one rank",
        "Gather first: `accelerator.gather_for_metrics(values)`, or `accelerator.reduce(value, 'mean')`.",
        predicates.metric_of_rank,
    ),
    DifferenceCause(
        "metric-of-means",
        "A logged value is a mean over ranks with different numbers of samples",
        "Gather sums and counts, or the values of all samples, and divide once.",
        predicates.metric_of_means,
    ),
    # It always has evidence, and so it must be the last of the causes of a difference.
    DifferenceCause(
        "unknown",
        "No cause in the table fits",
        "Look at what happens to the named tensor in the named step.",
        predicates.step_itself,
    ),
    # The run shows it by itself, without a comparison.
    DifferenceCause(
        "metric-over-padding",
        "A metric counts samples that only fill the last batch",
        "Gather with `accelerator.gather_for_metrics(...)`, which leaves these samples out.",
        predicates.metric_padding,
        explains="itself",
    ),
    DifferenceCause(
        "optimizer-of-copies",
        "The optimizer updates copies of the parameters",
        "Create it from `model.parameters()` of the same model that is prepared.",
        predicates.weights_stand_still,
        explains="itself",
    ),
    DifferenceCause(
        "evaluation-in-train-mode",
        "Evaluation runs in train mode",
        "Call `model.eval()` before evaluating and `model.train()` after it.",
        predicates.evaluates_in_training,
        explains="itself",
    ),
    DifferenceCause(
        "undivided-accumulation",
        "Accumulated losses are not divided by their number",
        "Use `gradient_accumulation_steps` and `with accelerator.accumulate(model)`, or divide each loss.",
        predicates.undivided_accumulation,
        explains="itself",
    ),
    DifferenceCause(
        "unused-accumulation",
        "Every micro-batch is a step, although accumulation is set",
        "Put the body of the loop in `with accelerator.accumulate(model):`.",
        predicates.unused_accumulation,
        explains="itself",
    ),
    DifferenceCause(
        "filler-in-training",
        "The model is trained on samples that only fill the last batch",
        "To compare more, choose a batch size that divides the samples, or `drop_last=True`.",
        predicates.filler_in_training,
        explains="itself",
        is_error=False,
    ),
    DifferenceCause(
        "model-by-rank",
        "Ranks create models with different weights",
        "Call `set_seed(0)`, without the rank, before you create the model, and `set_seed(0, device_specific=True)` after it.",
        predicates.model_by_rank,
        explains="itself",
        is_error=False,
    ),
    DifferenceCause(
        "dropout-repeats",
        "Ranks draw the same dropout masks",
        "Call `set_seed(0, device_specific=True)` after the model is created.",
        predicates.streams_repeat,
        explains="itself",
        is_error=False,
    ),
)
