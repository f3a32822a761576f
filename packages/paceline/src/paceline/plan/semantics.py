"""`Semantics`: how the loops of a library are meant, where libraries differ.

The same lines of a loop mean other numbers under another library: a short last batch may count as much as a full one, or less.
`Semantics` says it in one value, which is chosen before a run starts, travels in its plan, and is read by whoever acts.
Nothing is changed afterwards. `NATIVE` is Paceline's own; the part of another library defines that library's, in a file of the
same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Semantics:
    """How the loops of one library are meant.

    Attributes:
        library: the library whose scripts expect it.
        loss_weights: "samples": a loss counts by the samples of its micro-batch, so that a step is the mean over all samples;
            "equal": every micro-batch of every rank counts the same, and the script may say itself where a window ends.
        epoch_ends_window: whether the last batch of an epoch ends an accumulation window that is not full.
        tail: what becomes of the last global batch of an epoch: "divide" gives each rank a part of what is there, "pad" first
            fills the batch up with samples of the epoch's begin.
        order: who decides which samples a rank reads. "global": the run draws one order of all samples, and each rank reads
            its part of each global batch. "dealt": the script's sampler draws its batches, which are dealt to the ranks in
            turn. "dealt, seeded": the same with an order that follows from a seed and the epoch. "library": the loader that
            the library makes has an order of its own, in which each rank reads its part of each global batch.
        schedule: when a scheduler steps: "step": with each optimizer step that was taken; "process": so many times as there
            are processes; "call": each time that the script calls it.
        unknown_objects: what `prepare` does with an object of a kind that it does not know.
        unprepared_optimizers: whether an optimizer that was not prepared may step parameters of a prepared model; and whether
            a model that torch wraps already may be prepared, under a plan that leaves gradients whole.
        unprepared_loaders: whether a loop over a loader that was not prepared is warned of.
        ungathered_metrics: whether an evaluation whose ranks never gather anything is warned of.
        diverging_ranks: what happens where ranks that should train the same model have come apart.
        checkpoint: the layout of the folders that the script's way of saving writes: Paceline's own, or the library's.
        fp16_on_cpu: whether fp16 is computed on a CPU, or is ignored there.
    """

    library: str
    loss_weights: Literal["samples", "equal"] = "samples"
    epoch_ends_window: bool = True
    tail: Literal["divide", "pad"] = "divide"
    order: Literal["global", "dealt", "dealt, seeded", "library"] = "global"
    schedule: Literal["step", "process", "call"] = "step"
    unknown_objects: Literal["refused", "returned"] = "refused"
    unprepared_optimizers: Literal["refused", "allowed"] = "refused"
    unprepared_loaders: Literal["warned", "allowed"] = "warned"
    ungathered_metrics: Literal["warned", "allowed"] = "warned"
    diverging_ranks: Literal["refused", "warned"] = "refused"
    checkpoint: Literal["native", "library"] = "native"
    fp16_on_cpu: Literal["computed", "ignored"] = "computed"

    def explain(self) -> str:
        """Returns in one line what differs from `NATIVE`; "" for `NATIVE` itself."""
        differences = list(self._differences())
        if not differences:
            return ""
        return f"loops are meant as under {self.library}: {'; '.join(differences)}"

    def _differences(self) -> Iterator[str]:
        if self.loss_weights == "equal":
            yield "each micro-batch of each rank counts the same in a step"
        if self.order != NATIVE.order:
            yield _ORDERS[self.order]
        if self.tail != NATIVE.tail:
            yield "a last batch that is not full is filled up with the first samples"
        if self.schedule != NATIVE.schedule:
            yield _SCHEDULES[self.schedule]
        if not self.epoch_ends_window:
            yield "an accumulation window may go on in the next epoch"
        allowed = []
        if self.unknown_objects == "returned":
            allowed.append("objects of unknown kinds")
        if self.unprepared_optimizers == "allowed":
            allowed.append("optimizers that were not prepared")
        if self.unprepared_loaders == "allowed":
            allowed.append("loaders that were not prepared")
        if self.ungathered_metrics == "allowed":
            allowed.append("metrics that are not gathered")
        if allowed:
            *others, last = allowed
            yield f"{', '.join(others)} and {last} are accepted" if others else f"{last} are accepted"
        if self.diverging_ranks == "warned":
            yield "ranks whose models have come apart are warned of"
        if self.checkpoint != NATIVE.checkpoint:
            yield f"what the script saves has the files of {self.library}"
        if self.fp16_on_cpu == "ignored":
            yield "fp16 has no effect on a CPU"


NATIVE = Semantics("paceline")

_ORDERS = {
    "dealt": "batches of the script's sampler are dealt to the ranks in turn",
    "dealt, seeded": "batches are dealt to the ranks in turn, in an order that follows from a seed and the epoch",
    "library": "the library's own loader decides the order of samples",
}
_SCHEDULES = {"process": "a scheduler steps once for each process", "call": "a scheduler steps at each call"}
