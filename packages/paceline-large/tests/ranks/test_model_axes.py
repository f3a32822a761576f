"""Tensor, pipeline and context parallel: small models drawn at random, and one process in float64.

More of them: `python test_model_axes.py 100 200` runs the seeds from 100 to 199 under each plan.
"""

import random
import sys
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from shared_ranks import run_ranks
from torch import nn

from paceline import Accelerator, PacelineError

WIDTH, HEADS, POSITIONS, VOCABULARY, ROWS = 24, 12, 12, 24, 8


@dataclass(frozen=True)
class Drawn:
    """One program."""

    seed: int
    blocks: int
    kv_heads: int
    bias: bool
    norm: str  # layer, rms
    residual: str  # inside of the block, around its parts, or around the block
    gated: bool
    tied: bool
    added: int  # parameters [1, positions, width] that are added to the embedding
    drop: bool  # dropout of 0
    accumulate: int
    items: bool
    rows: tuple[int, ...]
    clip: float
    separate: bool  # whether the optimizer is prepared after the model


def draw(seed):
    source = random.Random(seed)
    accumulate = source.choice((1, 2))
    return Drawn(
        seed, source.choice((4, 5)), source.choice((12, 4, 1)), source.random() < 0.5, source.choice(("layer", "rms")),
        source.choice(("parts", "block", "outside")), source.random() < 0.5, source.random() < 0.4, source.choice((0, 1, 2)),
        source.random() < 0.5, accumulate, source.random() < 0.5,
        tuple(source.choice((ROWS, ROWS // 2)) for _ in range(2 * accumulate)), source.choice((0.05, 1e9)),
        source.random() < 0.3,
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self, drawn):
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, drawn.kv_heads
        narrow = WIDTH // HEADS * drawn.kv_heads
        self.q_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=drawn.bias) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, narrow, bias=drawn.bias) for _ in range(2))

    def forward(self, x):
        q, k, v = (
            y.view(*y.shape[:2], heads, -1).transpose(1, 2)
            for y, heads in (
                (self.q_proj(x), self.num_heads),
                (self.k_proj(x), self.num_kv_heads),
                (self.v_proj(x), self.num_kv_heads),
            )
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, drawn):
        super().__init__()
        if drawn.gated:
            self.gate_proj = nn.Linear(WIDTH, 36, bias=drawn.bias)
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 36, bias=drawn.bias), nn.Linear(36, WIDTH, bias=drawn.bias)
        self.gated = drawn.gated

    def forward(self, x):
        y = self.up_proj(x)
        return self.down_proj(F.silu(self.gate_proj(x)) * y if self.gated else F.gelu(y))


def norm_of(drawn):
    return nn.LayerNorm(WIDTH, bias=drawn.bias) if drawn.norm == "layer" else nn.RMSNorm(WIDTH)


class Block(nn.Module):
    def __init__(self, drawn):
        super().__init__()
        self.residual = drawn.residual
        self.norm1, self.norm2, self.attn, self.mlp = norm_of(drawn), norm_of(drawn), Attention(drawn), MLP(drawn)
        self.drop = nn.Dropout(0.0) if drawn.drop else nn.Identity()

    def forward(self, x):
        y = self.attn(self.norm1(x))
        if self.residual == "parts":
            y = x + y
        z = self.mlp(self.norm2(y))
        return self.drop(z if self.residual == "outside" else z + (y if self.residual == "parts" else x))


class Model(nn.Module):
    def __init__(self, drawn):
        super().__init__()
        self.outside = drawn.residual == "outside"
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.count = drawn.added
        for number in range(drawn.added):
            self.register_parameter(f"added{number}", nn.Parameter(torch.randn(1, POSITIONS, WIDTH) * 0.1))
        self.blocks = nn.ModuleList(Block(drawn) for _ in range(drawn.blocks))
        self.norm = norm_of(drawn)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if drawn.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for number in range(self.count):
            x = x + getattr(self, f"added{number}")
        for block in self.blocks:
            x = x + block(x) if self.outside else block(x)
        return self.head(self.norm(x))


def made(drawn):
    torch.manual_seed(drawn.seed)
    model = Model(drawn).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    return model, optimizer


def batches(drawn):
    generator = torch.Generator().manual_seed(drawn.seed)
    for rows in drawn.rows:
        tokens = torch.randint(0, VOCABULARY, (rows, POSITIONS + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        if drawn.items:
            targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
        yield tokens[:, :-1], targets


def mean_of(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def sum_of(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def plain(drawn):
    model, optimizer = made(drawn)
    given = list(batches(drawn))
    norms = []
    for start in range(0, len(given), drawn.accumulate):
        window = given[start : start + drawn.accumulate]
        items = sum(int((y != -100).sum()) for _, y in window)
        rows = sum(len(y) for _, y in window)
        for x, y in window:
            if drawn.items:
                (sum_of(model(x), y) / items).backward()
            else:
                (mean_of(model(x), y) * len(y) / rows).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), drawn.clip)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def ours(drawn, plan, groups=0):
    """`groups`: how many the script makes itself."""
    model, optimizer = made(drawn)
    accelerator = Accelerator("no", drawn.accumulate, plan=plan, cpu=True)
    for _ in range(groups):
        torch.distributed.new_group()
    if drawn.separate:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    layout = accelerator.plan.layout
    index = layout.data_index(accelerator.process_index)
    norms = []
    for x, y in batches(drawn):
        x, y = x.chunk(layout.width)[index], y.chunk(layout.width)[index]
        with accelerator.accumulate(model):
            if drawn.items:
                accelerator.forward_backward(model, (x, y), sum_of, num_items=int((y != -100).sum()))
            else:
                accelerator.forward_backward(model, (x, y), mean_of)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), drawn.clip)))
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).load_state_dict(state)
    again = accelerator.get_state_dict(model)
    # So that the next run creates groups of its own, as in a notebook.
    accelerator.end_training()
    return norms, again


def under(plan, seeds, groups=0):
    """What differs from one process under a plan: text by seed; codes of what was refused."""
    results = {}
    for seed in seeds:
        drawn = draw(seed)
        if plan.get("pp", 1) < 3:
            # More stages need the other two. What a plan does to a block shows in two or three of them.
            drawn = replace(drawn, blocks=drawn.blocks - 2)
        if not drawn.items and len(set(drawn.rows)) > 1 and drawn.accumulate > 1:
            # Without a loader nobody knows that windows have batches of other sizes.
            drawn = replace(drawn, rows=(ROWS,) * len(drawn.rows))
        try:
            norms, state = ours(drawn, plan, groups)
        except PacelineError as error:
            results[seed] = error.code
            continue
        want_norms, want = plain(drawn)
        wrong = [name for name in want if not torch.allclose(state[name], want[name], rtol=1e-8, atol=1e-9)]
        if list(state) != list(want) or norms != pytest.approx(want_norms, rel=1e-8) or wrong:
            results[seed] = f"{drawn}: norms {norms}, {want_norms}; weights {wrong}"
    return results


PLANS = (
    {"tp": 2}, {"tp": 3}, {"tp": 4}, {"pp": 2}, {"pp": 3}, {"pp": 4}, {"cp": 2}, {"cp": 3},
    {"tp": 2, "pp": 2}, {"tp": 2, "shard": 2}, {"tp": 2, "cp": 2}, {"pp": 2, "shard": 2},
)  # fmt: skip


def check(plan, seeds):
    size = 1
    for ranks in plan.values():
        size *= ranks
    return run_ranks(under, world=size, args=(plan, seeds), timeout_s=300)


# Two models for each plan, in turn: among the plans of an axis are all six, and each pair has different residual connections.
SEEDS = ((0, 3), (2, 5), (1, 4))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_drawn_models_have_the_numbers_of_one_process(plan):
    refused = {"tensor-heads"}  # 4 key-value heads on 3 ranks
    if "cp" in plan:
        refused.add("context-between")  # residual connections around the blocks
    for results in check(plan, SEEDS[PLANS.index(plan) % len(SEEDS)]):
        assert set(results.values()) <= refused
        assert len(results) < 2


def one_after_the_other(plans):
    return [under(plan, [0], groups) for groups, plan in enumerate(plans)]


def test_runs_under_several_plans_follow_in_one_process():
    # The stages have other numbers of units, by which ranks knew the messages of the next run. The meshes of the second and of
    # the last run are equal, with groups of other names, as the script makes some too: DTensor remembered those of the second.
    plans = ({"pp": 2, "shard": 2}, {"shard": 2, "replicate": 2}, {"shard": 2, "tp": 2}, {"shard": 2, "replicate": 2})
    for results in run_ranks(one_after_the_other, world=4, args=(plans,), timeout_s=300):
        assert results == [{}] * len(plans)


if __name__ == "__main__":
    for plan in PLANS:
        first, end = map(int, sys.argv[1:])
        print(plan, check(plan, range(first, end))[0] or "equal", flush=True)
