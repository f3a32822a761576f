"""Ways of training one GPT on several ranks: Paceline's plans, the same by hand in native PyTorch, and peers.

A way is a function `(task) -> step`: it builds model and optimizer on this rank and gives a function that does one
training step. No way clips or logs; AdamW is fused everywhere it can be, as that is the fastest on a CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from .model import gpt, loss_of, tokens

Step = Callable[[], None]
Way = Callable[["Task"], Step]


@dataclass(frozen=True)
class Task:
    """What is trained: the model's size, and this rank's rows of so many tokens in each step."""

    size: str = "24M"
    rows: int = 8
    length: int = 64
    device: str = "cpu"

    def model(self) -> nn.Module:
        return gpt(self.size).to(self.device)

    def batch(self) -> tuple[Tensor, Tensor]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        drawn = tokens(self.rows, self.length, rank).to(self.device)
        return drawn[:, :-1], drawn[:, 1:]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _loop(task: Task, model: nn.Module, optimizer: Any, backward: Callable[[Tensor], Any] = Tensor.backward) -> Step:
    inputs, targets = task.batch()

    def step() -> None:
        optimizer.zero_grad()
        backward(loss_of(model(inputs), targets))
        optimizer.step()

    return step


# -- Paceline ---------------------------------------------------------------------------------------------------------


def paceline(
    precision: str = "no", options: Mapping[str, Any] | None = None, eight_bits: bool = False, **plan: Any
) -> Way:
    """What a user of Paceline writes, under any plan; with `eight_bits` for the states of the optimizer."""

    def way(task: Task) -> Step:
        from paceline import Accelerator

        accelerator = Accelerator(precision, plan=plan, options=options, cpu=task.device == "cpu")
        model = gpt(task.size)
        if eight_bits:
            from paceline.optim import adamw8bit

            given = adamw8bit(model.parameters(), lr=1e-3)
        else:
            given = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, given)
        return _loop(task, model, optimizer, accelerator.backward)

    return way


# -- native PyTorch, by hand --------------------------------------------------------------------------------------------


def ddp(views: bool = True) -> Way:
    """DistributedDataParallel; with gradients as views of its buckets it is the best of them."""

    def way(task: Task) -> Step:
        model = DistributedDataParallel(task.model(), gradient_as_bucket_view=views)
        return _loop(task, model, adamw(model.parameters()))

    return way


def zero_redundancy(task: Task) -> Step:
    """DDP with torch's ZeroRedundancyOptimizer: stage 1 of ZeRO."""
    model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    return _loop(task, model, optimizer)


def fully_sharded(reshard: bool) -> Way:
    """torch's FSDP2 around each block and the whole."""

    def way(task: Task) -> Step:
        from torch.distributed.fsdp import fully_shard

        model = task.model()
        for part in (*model.blocks, model):
            fully_shard(part, reshard_after_forward=reshard)
        return _loop(task, model, adamw(model.parameters()))

    return way


# -- peers --------------------------------------------------------------------------------------------------------------


def deepspeed(stage: int) -> Way:
    """DeepSpeed's ZeRO with torch's AdamW, without persistence thresholds and with buckets that fit the model."""

    def way(task: Task) -> Step:
        import deepspeed as peer

        model = task.model()
        biggest = max(1, sum(parameter.numel() for parameter in model.parameters()))
        zero = {"stage": stage, "reduce_bucket_size": biggest, "allgather_bucket_size": biggest}
        if stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1 << 20}
        settings = {
            "train_micro_batch_size_per_gpu": task.rows,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # 1.0 unless it is said, and none of the others clips
        }
        engine, _, _, _ = peer.initialize(
            model=model, optimizer=adamw(model.parameters()), config=settings, dist_init_required=False
        )
        inputs, targets = task.batch()

        def step() -> None:
            engine.backward(loss_of(engine(inputs), targets))
            engine.step()

        return step

    return way


def deepspeed_is_there() -> bool:
    """Whether DeepSpeed can be imported here."""
    return importlib.util.find_spec("deepspeed") is not None
