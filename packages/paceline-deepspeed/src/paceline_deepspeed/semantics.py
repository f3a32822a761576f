"""`DEEPSPEED`: how the loops of scripts for DeepSpeed are meant."""

from paceline.plan.semantics import Semantics

DEEPSPEED = Semantics(
    "DeepSpeed",
    loss_weights="equal",
    epoch_ends_window=False,  # the engine counts micro-batches, and the script holds its windows itself
    order="library",
    unprepared_loaders="allowed",  # such scripts divide samples themselves
    ungathered_metrics="allowed",
    checkpoint="library",
)
