"""A loop over DeepSpeed's engine that saves half-way, and from stage 1 on converts that to a universal checkpoint.

Options: `stage`; `bf16`; `universal`, whether the second run loads the universal one.
"""

import json
import sys

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from record import summary, write
from torch import nn

folder, options = sys.argv[1], json.loads(sys.argv[2])


def config():
    """DeepSpeed's, without a kernel that would have to be compiled."""
    stage = options["stage"]
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": options.get("bf16", False)},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 2e-2}},
        "checkpoint": {"load_universal": options.get("universal", False) and options.get("resume", False)},
    }


def run(resume):
    """Twelve windows; the second time the last six."""
    deepspeed.init_distributed("gloo")
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config())
    rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    place, client = f"{folder}/saved", {}
    if resume:
        _, client = engine.load_checkpoint(place, "half_universal" if options.get("universal") else "half")
    losses = []
    for number in range(12 if resume else 0, 24):
        draw = torch.Generator().manual_seed(number * ranks + rank)
        rows = torch.randn(4, 6, generator=draw).to(next(engine.module.parameters()).dtype)
        loss = engine(rows).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append([loss.item(), engine.get_lr()[0], engine.global_steps])
        if number == 11 and not resume:
            engine.save_checkpoint(place, "half", client_state={"note": "half-way"})
            deepspeed.comm.barrier()
            if options["stage"] and rank == 0:
                words = ["--input_folder", f"{place}/half", "--output_folder", f"{place}/half_universal"]
                words.append("--inject_missing_state")  # what DeepSpeed otherwise expects the script to save
                ds_to_universal.main(_arguments(words))
            deepspeed.comm.barrier()
    weights = summary(_whole(engine))
    write(folder, losses=losses, weights=weights, note=(client or {}).get("note"))


def _arguments(words):
    """What the command's own parser makes of words; it reads those of the process."""
    before, sys.argv = sys.argv, ["ds_to_universal", *words]
    try:
        return ds_to_universal.parse_arguments()
    finally:
        sys.argv = before


def _whole(engine):
    """The whole weights."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=None):
        return {name: value.detach().clone() for name, value in engine.module.state_dict().items()}


run(options.get("resume", False))
