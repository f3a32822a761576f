"""`ACCELERATE`: how the loops of scripts for accelerate are meant."""

from paceline.plan.semantics import Semantics

ACCELERATE = Semantics(
    "accelerate",
    loss_weights="equal",
    tail="pad",
    order="dealt",
    schedule="process",
    unknown_objects="returned",
    unprepared_optimizers="allowed",
    ungathered_metrics="allowed",  # such scripts gather with functions of the library, or of their own
    checkpoint="library",
    fp16_on_cpu="ignored",
)
