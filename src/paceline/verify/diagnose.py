"""The table of causes: what each is called, what speaks for it (`predicates.py`), and how to mend it. Pure.

`CAUSES` is in order: of several that fit, the first is the likeliest, since later ones follow from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.verify import predicates
from paceline.verify.predicates import Evidence


@dataclass(frozen=True)
class Cause:
    """One entry of the table.

    Attributes:
        name: by which tests and scripts know it.
        title: one line.
        fix: what to do, in one or two sentences.
        evidence_for: what speaks for it; "" for nothing.
        explains: a "difference" from one process, a difference of a "repeat", or nothing that differs, but what the
            run does "itself".
        is_error: whether the numbers are wrong; otherwise it is worth knowing.
    """

    name: str
    title: str
    fix: str
    evidence_for: Callable[[Evidence], str]
    explains: str = "difference"
    is_error: bool = True


@dataclass(frozen=True)
class Finding:
    """A cause that something speaks for, and what that is."""

    cause: Cause
    evidence: str


def diagnose(evidence: Evidence) -> list[Finding]:
    """What explains the evidence: at most one cause of the difference, and all that the run does by itself."""
    kind = "repeat" if evidence.is_repeat else "difference"
    findings: list[Finding] = []
    if evidence.first is not None:
        for cause in CAUSES:
            sentence = cause.evidence_for(evidence) if cause.explains == kind else ""
            if sentence:
                findings.append(Finding(cause, sentence))
                break
    if not evidence.is_repeat:
        for cause in CAUSES:
            sentence = cause.evidence_for(evidence) if cause.explains == "itself" else ""
            if sentence:
                findings.append(Finding(cause, sentence))
    return findings


CAUSES: tuple[Cause, ...] = (
    Cause(
        "unseeded-model",
        "The model begins with other weights each time",
        "Call `set_seed(0)` before the model is made.",
        predicates.unseeded_model,
        explains="repeat",
    ),
    Cause(
        "unseeded-order",
        "The order of samples changes from run to run",
        "Do not take an order from a set, a hash, a clock or an unseeded generator: sort it, and shuffle by the loader.",
        predicates.unseeded_order,
        explains="repeat",
    ),
    Cause(
        "data-by-clock",
        "Samples are changed by something that no seed decides",
        "Draw augmentation from torch's or numpy's generator in the dataset, or from the sample's index and the epoch; not "
        "from the time, the process id or `os.urandom`.",
        predicates.data_by_clock,
        explains="repeat",
    ),
    Cause(
        "unseeded-draws",
        "Random numbers are drawn that no seed decides",
        "Call `set_seed(0)` first, and give a generator of your own a seed.",
        predicates.unseeded_draws,
        explains="repeat",
    ),
    Cause(
        "nondeterministic-kernel",
        "The same computation gives another result",
        "A kernel adds in no fixed order, or a draw has no seed: try `set_seed(0, deterministic=True)`, which names such "
        "kernels.",
        predicates.nondeterministic_kernel,
        explains="repeat",
    ),
    Cause(
        "model-unprepared",
        "The model was not prepared",
        "Use what `prepare` returns: `model, optimizer, loader = accelerator.prepare(model, optimizer, loader)`.",
        predicates.model_unprepared,
    ),
    Cause(
        "model-by-width",
        "The model begins with other weights than on one process",
        "Call `set_seed(0)`, without the rank or the number of ranks, before the model is made.",
        predicates.model_by_width,
    ),
    Cause(
        "loader-unprepared",
        "The loader was not prepared: all ranks read the same rows",
        "Prepare it: `loader = accelerator.prepare(loader)`, and iterate what comes back.",
        predicates.loader_unprepared,
    ),
    Cause(
        "sampler-ignores-rank",
        "A sampler gives all ranks the same rows",
        "Leave the division to `accelerator.prepare(loader)`, or give the sampler the rank and the number of ranks.",
        predicates.sampler_ignores_rank,
    ),
    Cause(
        "batch-by-rank",
        "The global batch grows with the number of ranks",
        "Let `prepare` divide the loader's batch, or divide the batch size by the number of ranks. If you want the batch to "
        "grow, you also want other numbers than on one process, and there is nothing to correct.",
        predicates.batch_by_rank,
    ),
    Cause(
        "order-by-width",
        "Samples come in another order than on one process",
        "Do not seed the order by the rank or the number of ranks; call `set_seed(0)` alike on all.",
        predicates.order_by_width,
    ),
    Cause(
        "data-by-rank",
        "Samples have other values on some ranks",
        "Augmentation must not depend on the rank, or on how many samples this process has read: draw it from the sample's "
        "index, or in the workers of a prepared loader.",
        predicates.data_by_rank,
    ),
    Cause(
        "micro-batches-by-rank",
        "A step takes another number of micro-batches",
        "Do not count micro-batches by the number of ranks: `gradient_accumulation_steps` and `accumulate` do it.",
        predicates.micro_batches,
    ),
    Cause(
        "rows-differ",
        "A step reads other samples",
        "Do not skip or select batches by the rank; let `prepare` divide them.",
        predicates.rows_differ,
    ),
    Cause(
        "scheduler-by-process",
        "The scheduler steps once for each process",
        "Step it once after each optimizer step, without a loop over processes; prepare it.",
        predicates.scheduler_by_process,
    ),
    Cause(
        "rate-by-ranks",
        "The learning rate is multiplied by the number of ranks",
        "Set it for the global batch, which does not change with the ranks here.",
        predicates.rate_by_ranks,
    ),
    Cause(
        "rate-differs",
        "The learning rate follows another schedule",
        "Build the schedule from `len(prepared_loader)`, in optimizer steps.",
        predicates.rate_differs,
    ),
    Cause(
        "batch-norm-by-rank",
        "Batch norm uses the statistics of each rank's rows",
        "Let the plan combine them: `--option batch_norm.statistics=synced`.",
        predicates.batch_norm,
    ),
    Cause(
        "sum-of-rows",
        "The loss is a sum over the rank's rows",
        "Use `reduction='mean'`, or `accelerator.backward(loss, num_items=n)` with the number of items that it sums over.",
        predicates.sum_of_rows,
    ),
    Cause(
        "loss-by-ranks",
        "The loss is multiplied by the number of ranks",
        "Give `backward` the mean over this rank's rows; gradients are averaged for you.",
        predicates.loss_by_ranks,
    ),
    Cause(
        "draws-in-forward",
        "The forward pass draws random numbers, which are others for each number of processes",
        "This may be right (noise, stochastic depth, sampling), but it cannot be compared: turn it off while you verify, for "
        "example by a rate of 0.",
        predicates.draws_in_forward,
        is_error=False,
    ),
    Cause(
        "draws-by-rank",
        "Some ranks draw random numbers that others do not draw",
        "Draw on all ranks, or from a generator of its own under `if accelerator.is_main_process`.",
        predicates.random_by_rank,
    ),
    Cause(
        "seeds-by-rank",
        "Ranks draw different random numbers for what they should share",
        "Seed all ranks alike, or draw such numbers on one rank and broadcast them.",
        predicates.seeds_by_rank,
    ),
    Cause(
        "weights-by-rank",
        "Ranks have drifted apart",
        "Change weights on all ranks alike, and only by the prepared optimizer.",
        predicates.weights_by_rank,
    ),
    Cause(
        "mean-of-means",
        "The loss is no mean over rows, so the mean of the ranks' losses is another number",
        "Where it counts tokens or masked items, sum it and call `accelerator.backward(loss, num_items=n)`; where rows are "
        "compared with each other, gather them first.",
        predicates.uneven_mean,
    ),
    Cause(
        "gradient-sum",
        "Gradients are added up over ranks, and not averaged",
        "Leave them to the plan: `accelerator.backward(loss)` averages; take your own all-reduce out, or divide by the ranks.",
        predicates.gradient_sum,
    ),
    Cause(
        "clip-by-part",
        "Gradients are changed by what one rank knows",
        "Clip with `accelerator.clip_grad_norm_(model.parameters(), 1.0)`, which takes the norm over all ranks, after "
        "unscaling.",
        predicates.clip_by_part,
    ),
    Cause(
        "metric-of-one-rank",
        "A logged value is that of one rank",
        "Gather first: `accelerator.gather_for_metrics(values)`, or `accelerator.reduce(value, 'mean')`.",
        predicates.metric_of_rank,
    ),
    Cause(
        "metric-of-means",
        "A logged value is a mean of ranks that count differently",
        "Gather sums and counts, or the rows themselves, and divide once.",
        predicates.metric_of_means,
    ),
    Cause(
        "unknown",
        "No cause in the table fits",
        "Look at what happens to the named tensor in the named step.",
        predicates.step_itself,
    ),
    Cause(
        "metric-over-padding",
        "A metric counts filler rows",
        "Gather with `accelerator.gather_for_metrics(...)`, which leaves out what fills the last batch.",
        predicates.metric_padding,
        explains="itself",
    ),
    Cause(
        "optimizer-of-copies",
        "The optimizer steps copies of the parameters",
        "Build it from `model.parameters()` of the very model that is prepared.",
        predicates.weights_stand_still,
        explains="itself",
    ),
    Cause(
        "evaluation-in-train-mode",
        "Evaluation runs in train mode",
        "Call `model.eval()` before evaluating and `model.train()` after it.",
        predicates.evaluates_in_training,
        explains="itself",
    ),
    Cause(
        "undivided-accumulation",
        "Accumulated losses are not divided by their number",
        "Use `gradient_accumulation_steps` and `with accelerator.accumulate(model)`, or divide each loss.",
        predicates.undivided_accumulation,
        explains="itself",
    ),
    Cause(
        "unused-accumulation",
        "Every micro-batch is a step, although they were to be accumulated",
        "Put the body of the loop in `with accelerator.accumulate(model):`.",
        predicates.unused_accumulation,
        explains="itself",
    ),
    Cause(
        "filler-in-training",
        "Filler of the last batch is trained on",
        "To compare more, choose a batch size that divides the samples, or `drop_last=True`.",
        predicates.filler_in_training,
        explains="itself",
        is_error=False,
    ),
    Cause(
        "model-by-rank",
        "Ranks make models with different weights",
        "Call `set_seed(0)`, without the rank, before the model is made; `set_seed(0, device_specific=True)` comes after it.",
        predicates.model_by_rank,
        explains="itself",
        is_error=False,
    ),
    Cause(
        "dropout-repeats",
        "Ranks draw the same dropout masks",
        "Call `set_seed(0, device_specific=True)` after the model is made.",
        predicates.streams_repeat,
        explains="itself",
        is_error=False,
    ),
)
