"""What is compared with DeepSpeed: cases as data, read by the recorder and by the tests."""

import itertools
import math

# -- schedules: name -> (type, parameters, steps) over one group with lr 3e-3, betas (0.9, 0.95) --------------------------

GROUP = {"lr": 3e-3, "betas": (0.9, 0.95)}
SCHEDULES = {
    "warmup log": ("WarmupLR", {"warmup_max_lr": 1e-3, "warmup_num_steps": 300}),
    "warmup linear": ("WarmupLR", {"warmup_min_lr": 1e-5, "warmup_num_steps": 400, "warmup_type": "linear"}),
    "warmup at once": ("WarmupLR", {"warmup_max_lr": 1e-3, "warmup_num_steps": 1}),
    "decay log": ("WarmupDecayLR", {"total_num_steps": 900, "warmup_num_steps": 100}),
    "decay linear": (
        "WarmupDecayLR",
        {"total_num_steps": 1200, "warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3, "warmup_num_steps": 250,
         "warmup_type": "linear"},
    ),
    "cosine log": ("WarmupCosineLR", {"total_num_steps": 950, "warmup_num_steps": 120}),
    "cosine linear": (
        "WarmupCosineLR",
        {"total_num_steps": 1000, "warmup_min_ratio": 0.1, "warmup_num_steps": 200, "cos_min_ratio": 0.05,
         "warmup_type": "linear"},
    ),
    "range": ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 170, "lr_range_test_step_rate": 2.5}),
    "range stairs": ("LRRangeTest", {"lr_range_test_step_size": 90, "lr_range_test_staircase": True}),
    "cycle": (
        "OneCycle",
        {"cycle_min_lr": 1e-4, "cycle_max_lr": 4e-3, "cycle_first_step_size": 300, "decay_step_size": 50, "decay_lr_rate": 0.2,
         "decay_mom_rate": 0.01},
    ),
    "cycle stairs": (
        "OneCycle",
        {"cycle_min_lr": 1e-4, "cycle_max_lr": 4e-3, "cycle_first_step_size": 200, "cycle_second_step_size": 350,
         "cycle_first_stair_count": 5, "cycle_second_stair_count": 7, "cycle_momentum": False},
    ),
    "cycle of 1,000": ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1e-2, "cycle_first_step_size": 500}),
}  # fmt: skip
STEPS = 1000

# -- partitions: name -> (sizes of layers, class names) -------------------------------------------------------------------

LAYERS = {
    "equal": [100] * 12,
    "one": [100],
    "two": [100, 100],
    "three": [5, 5, 5],
    "seven": [10] * 7,
    "embedding first": [50000] + [7000] * 12,
    "embedding both": [50000] + [7000] * 12 + [50000],
    "head last": [0] + [7000] * 8 + [300, 40000],
    "growing": list(range(1, 17)),
    "shrinking": list(range(24, 0, -2)),
    "alternating": [1000, 0] * 8,
    "activations": [820, 0, 420, 0, 110, 0, 10],
    "pyramid": [1, 4, 16, 64, 256, 64, 16, 4, 1],
    "one giant": [3, 3, 3, 3000, 3, 3, 3, 3],
    "giant at the end": [3] * 10 + [3000],
    "nothing": [0] * 9,
    "primes": [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37],
    "noise": [(37 * i * i + 11) % 101 for i in range(24)],
    "coarse noise": [(13 * i) % 7 for i in range(18)],
    "long": [1 + (i % 5 == 0) * 9 + (i % 7) for i in range(48)],
}
STAGES = (1, 2, 3, 4, 8)
# For partition_method="type:REGEX": class names of a list, by the sizes above (0 is an activation).
REGEXES = ("linear", "^Lin", "relu|norm", "block")


def class_names(sizes):
    """Names that go with sizes: the first and biggest is an embedding, nothing is a ReLU, odd ones are blocks."""
    return [
        "ReLU" if size == 0 else "Embedding" if size >= 40000 else ("TransformerBlock" if index % 2 else "Linear")
        for index, size in enumerate(sizes)
    ]


# -- the batch triangle: (train, micro, accumulate, width) ----------------------------------------------------------------

BATCHES = [
    (train, micro, accumulate, width)
    for train, micro, accumulate in itertools.product((None, 0, 7, 32, 64), (None, 0, 3, 8), (None, 0, 1, 2))
    for width in (1, 2, 3)
]

# -- the loss scale: name -> (parameters, steps that overflow) ------------------------------------------------------------

_DEFAULTS = {
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1.0,
}
SCALES = {
    name: ({**_DEFAULTS, **given}, sorted(overflows))
    for name, given, overflows in (
        ("defaults", {}, {0, 1, 2, 3, 50, 51, 700}),
        ("short window", {"loss_scale_window": 5, "initial_scale_power": 4}, {7, 8, 9, 30, 31, 32, 33, 80}),
        ("window of one", {"loss_scale_window": 1, "initial_scale_power": 2}, {3, 9, 10, 20}),
        ("no hysteresis", {"hysteresis": 1, "loss_scale_window": 10}, {0, 1, 2, 25, 26, 40}),
        ("hysteresis of four", {"hysteresis": 4, "loss_scale_window": 8}, {1, 3, 5, 7, 9, 11, 40, 41, 42, 43, 44}),
        ("consecutive", {"consecutive_hysteresis": True, "loss_scale_window": 8}, {1, 3, 5, 6, 7, 30, 31, 32, 50}),
        ("to the minimum", {"initial_scale_power": 3, "min_loss_scale": 2.0, "loss_scale_window": 4}, set(range(3, 9))),
        ("onto the minimum", {"initial_scale_power": 3, "min_loss_scale": 2.0, "hysteresis": 1, "loss_scale_window": 4},
         {1, 2, 12, 13, 30}),
        ("a minimum beside the way", {"initial_scale_power": 3, "min_loss_scale": 3.0, "hysteresis": 1}, {1, 2}),
        ("often", {"loss_scale_window": 3, "initial_scale_power": 8}, set(range(0, 1000, 11))),
    )
}  # fmt: skip
# The same cases end here where the scale would have to go below its minimum.
SCALE_STEPS = 120


def finite(value):
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


# -- training: name -> (model, steps, config), on two processes -------------------------------------------------------------


def _config(stage, accumulate=1, clip=0.0, **more):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})},
        **more,
    }


TRAINING = {
    f"{model} zero {stage} accumulate {accumulate} clip {clip}": (model, 6, _config(stage, accumulate, clip))
    for model, stage, accumulate, clip in itertools.product(("mlp", "transformer"), range(4), (1, 2), (0.0, 1.0))
}
TRAINING |= {
    f"{model} bf16 zero {stage}": (model, 6, _config(stage, bf16={"enabled": True}))
    for model in ("mlp", "transformer")
    for stage in range(4)
}
TRAINING["scheduled"] = (
    "mlp",
    8,
    _config(
        1,
        2,
        1.0,
        scheduler={
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 8, "warmup_max_lr": 0.02, "warmup_num_steps": 3},
        },
    ),
)
FP16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 2}
# Losses of these steps are multiplied until gradients overflow in float16; stage 0 has another rule there.
FP16_OVERFLOWS = (2, 3, 9, 10, 11, 16)
FP16_STEPS = 24
FP16_TRAINING = {f"fp16 zero {stage}": ("mlp", FP16_STEPS, _config(stage, fp16=FP16)) for stage in (1, 2, 3)}
