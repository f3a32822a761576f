"""The programs: where each lies, how it is started, and what is expected of it. None of their lines is in this repository."""

from __future__ import annotations

from dataclasses import dataclass, field

EXAMPLES = "deepspeedai/DeepSpeedExamples"


@dataclass(frozen=True)
class Program:
    """One program with one command.

    Attributes:
        name: unique in the table.
        repository: `owner/name` on GitHub.
        folder: of the program in the repository; it runs there, in a copy.
        command: the script and its arguments.
        expected: "equal": each rank computes the losses of the real library. "refused CODE": it ends with this code.
            "own fault": it fails under the real library on a CPU, so that only our outcome is told.
        procs: numbers of processes.
        samples: of a data set that is drawn in place of a download.
        tolerance: largest relative difference of a loss.
        env: further variables.
    """

    name: str
    repository: str
    folder: str
    command: tuple[str, ...]
    expected: str = "equal"
    procs: tuple[int, ...] = (1, 2)
    samples: int = 64
    tolerance: float = 1e-5
    env: dict[str, str] = field(default_factory=dict)


def example(name: str, folder: str, command: str, expected: str = "equal", **others: object) -> Program:
    """Returns a program of DeepSpeedExamples."""
    return Program(name, EXAMPLES, folder, tuple(command.split()), expected, **others)  # type: ignore[arg-type]


_BF16 = (
    "train.py --deepspeed_config configs/{}.json --num_layers 2 --hidden_dim 64 --num_heads 4 --vocab_size 500 "
    "--seq_length 32 --num_steps 6"
)
PROGRAMS = (
    *(
        example(f"cifar zero {stage} {dtype}", "training/cifar",
                f"cifar10_deepspeed.py --deepspeed --epochs 2 --dtype {dtype} --stage {stage}",
                tolerance=1e-5 if dtype == "fp32" else 2e-2)
        for stage, dtype in ((0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32"))
    ),
    example("cifar moe", "training/cifar",
            "cifar10_deepspeed.py --deepspeed --epochs 1 --dtype fp32 --moe --ep-world-size 2 --num-experts 2 --top-k 1 "
            "--noisy-gate-policy RSample --moe-param-group", "refused", procs=(2,)),
    example("gan", "training/gan",
            "gan_deepspeed_train.py --dataset cifar10 --workers 0 --batchSize 16 --imageSize 64 --ngf 8 --ndf 8 --epochs 2 "
            "--deepspeed_config gan_deepspeed_config.json"),
    example("pipeline base", "training/pipeline_parallelism",
            "train.py --deepspeed_config=ds_config.json -p 0 --steps=1 --backend gloo", samples=256,
            procs=(1,)),  # dropout: on several processes each library draws its own
    example("pipeline 2", "training/pipeline_parallelism",
            "train.py --deepspeed_config=ds_config.json -p 2 --steps=1 --backend gloo", samples=256, procs=(2,)),
    *(
        example(f"bf16_master_weight {config}", "training/bf16_master_weight", _BF16.format(config), tolerance=2e-2)
        for config in ("baseline", "bf16_full")
    ),
    example("offload_states", "training/offload_states",
            "offload_states.py --hidden_dim 64 --nlayers 2 --dtype torch.float32 --iteration 8",
            env={"PYTHONOPTIMIZE": "1"}),  # it asserts that memory of a device becomes free
    example("zenflow", "training/DeepSpeed-ZenFlow/benchmark",
            "zf_benchmark.py --hidden_dim 64 --iteration 6 --pin_memory_opts 0 --topk_ratios 0.1 --update_intervals 2 "
            "--overlap_steps 1", "refused", procs=(1,)),
    example("variable batch size", "training/data_efficiency/variable_batch_size_and_lr",
            "variable_batch_size_and_lr_example.py", "refused", procs=(2,)),
    example("imagenet", "training/imagenet",
            "main.py -a resnet18 --deepspeed --deepspeed_config config/ds_config.json --multiprocessing_distributed "
            "--dist-backend gloo -b 8 -j 0 --epochs 1 --print-freq 1 .", samples=32),
)  # fmt: skip
