"""Context parallel: the user's model and loop, sequences divided, one process's numbers."""

import logging
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from late_module import LateModule
from shared_ranks import run_ranks
from torch import nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as imported_early

from paceline import Accelerator, PlanError, TrainError, set_seed

LLAMA = LateModule("transformers.models.llama.modeling_llama", optional=True)  # before the ranks are forked
WIDTH, VOCABULARY = 24, 17


def heads_of(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Rotary(nn.Module):
    """Causal attention with rotary tables from outside, fewer key heads than query heads, and a scale of its own."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.q, self.kv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.o, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, cos, sin, mask=None):
        y = self.norm(x)
        q, (k, v) = heads_of(self.q(y), 4), (heads_of(part, 2) for part in self.kv(y).chunk(2, -1))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = imported_early(q, k, v, mask, is_causal=mask is None, scale=0.3, enable_gqa=True)
        x = x + self.drop(self.o(mixed.transpose(1, 2).flatten(2)))
        return x + self.down(functional.gelu(self.up(x)))


class Decoder(nn.Module):
    """A decoder; with `masks`, padding (token 0) is hidden by a mask [B, 1, S, S]."""

    def __init__(self, masks=False, block=Rotary, layers=2):
        super().__init__()
        self.masks = masks
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x, length = self.embed(tokens), tokens.shape[1]
        angles = torch.arange(length)[:, None] * torch.tensor([1.0, 0.3, 0.1])
        mask = None
        if self.masks:
            mask = torch.ones(length, length, dtype=torch.bool).tril() & (tokens != 0)[:, None, None, :]
            mask[..., 0] = True
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), mask=mask)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """torch's own encoder; `how`: its mask, and whether batches come first."""

    def __init__(self, how="full", batch_first=True):
        super().__init__()
        self.how, self.batch_first = how, batch_first
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=batch_first)
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.embed(tokens) + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length) if "causal" in self.how else None
        padding = None
        if "padding" in self.how:
            padding = tokens == 0
            padding[:, 0] = False
            padding = torch.zeros(padding.shape).masked_fill(padding, float("-inf"))
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, mask=mask, src_key_padding_mask=padding, is_causal=self.how == "causal")
        return self.head(x if self.batch_first else x.transpose(0, 1))


def llama():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="sdpa",
    )

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.llama = transformers.LlamaForCausalLM(config)

        def forward(self, tokens):
            return self.llama(tokens, attention_mask=(tokens != 0).long()).logits

    return Logits()


MODELS = {
    "decoder": Decoder,
    "masked": lambda: Decoder(masks=True),
    "full": Encoder,
    "causal": lambda: Encoder("causal"),
    "padding": lambda: Encoder("padding"),
    "causal padding": lambda: Encoder("causal, padding"),
    "sequence first": lambda: Encoder("causal", batch_first=False),
    "llama": llama,
}


def train(name: str, lengths: tuple[int, ...], plan: dict[str, Any], options: dict[str, Any], precision="no"):
    """A few steps on batches of these lengths, and an evaluation."""
    torch.manual_seed(3)
    model = MODELS[name]()
    if plan and isinstance(model, Encoder) and model.batch_first:
        model.encoder.use_nested_tensor = True  # torch's default, of which the warning is saved here
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    accelerator = Accelerator(precision, plan=plan, options=options, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms, generator = [], [], torch.Generator().manual_seed(4)
    for length in lengths:
        tokens = torch.randint(1, VOCABULARY, (3, length + 1), generator=generator)
        tokens[0, -3:] = tokens[1, -1:] = 0
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        output = model(tokens[:, :-1])
    weights = accelerator.get_state_dict(model)
    return {"losses": losses, "norms": norms, "output": output, "weights": weights}


def train_all(names: tuple[str, ...], *args: Any) -> list[Any]:
    return [train(name, *args) for name in names]


@cache
def alone(names: tuple[str, ...], lengths: tuple[int, ...], precision: str = "no") -> list[Any]:
    return run_ranks(train_all, world=1, args=(names, lengths, {}, {}, precision))[0]


def check(world: int, names: tuple[str, ...], lengths: tuple[int, ...], plan: dict[str, Any], **options: Any) -> None:
    for ranks in run_ranks(train_all, world=world, args=(names, lengths, plan, {"context": options})):
        for name, got, want in zip(names, ranks, alone(names, lengths), strict=True):
            assert got["losses"] == pytest.approx(want["losses"], abs=2e-6), name
            assert got["norms"] == pytest.approx(want["norms"], abs=5e-6), name
            for key, weight in want["weights"].items():
                close(got["weights"][key], weight, 3e-6, f"{name}: {key}")
            close(got["output"], want["output"], 2e-5, name)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0, msg=lambda text: f"{what}: {text}")


ALL = tuple(name for name in MODELS if name not in ("sequence first", "llama"))


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_two_ranks_equal_one_process(method: str) -> None:
    check(2, ALL, (12, 7, 9), {"cp": 2}, method=method)  # 7 and 9 are filled up


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_four_ranks_equal_one_process(method: str) -> None:
    check(4, ("masked", "decoder"), (9, 16), {"cp": 4}, method=method)


def test_the_sequence_may_come_first() -> None:
    check(2, ("sequence first",), (8,), {"cp": 2}, dim=0)


def test_recomputed_blocks_find_their_region_again() -> None:
    check(2, ("decoder",), (12, 7), {"cp": 2, "recompute": "blocks"}, method="ring")


class Tables(Rotary):
    """Multiplies queries and keys by a table [S, 12], and adds a bias [B, 1, 1, 12]."""

    def forward(self, x, table, bias):
        q, (k, v) = heads_of(self.q(x), 2), (heads_of(part, 1) for part in self.kv(x).chunk(2, -1))
        q = q * table + bias
        mixed = imported_early(q, k * table, v, is_causal=True, enable_gqa=True)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Tables() for _ in range(2))

    def forward(self, x, table, bias):
        for layer in self.layers:
            x = layer(x, table, bias)
        return x


def tables(plan: dict[str, Any]) -> list[float]:
    """Sizes of which a beginning of 4, 8, 12, ... positions, as a trial takes it, has some in common."""
    torch.manual_seed(3)
    accelerator = Accelerator(plan=plan, cpu=True)
    losses = []
    # The trials of these lengths have 12, 4, 24 and 8 positions; a model is tried at its first sequence.
    for batch, length in ((2, 13), (4, 6), (3, 26), (8, 9)):
        model = accelerator.prepare(TwoTables())
        x, table = torch.randn(batch, length, WIDTH), torch.randn(length, 12)
        y = model(x, table, torch.randn(batch, 1, 1, 12))
        losses.append(float(y.square().mean().detach()))
    return losses


def test_trials_are_as_long_as_other_sizes() -> None:
    want = run_ranks(tables, world=1, args=({},))[0]
    for losses in run_ranks(tables, world=2, args=({"cp": 2},)):
        assert losses == pytest.approx(want, abs=1e-6)


def test_transformers() -> None:
    pytest.importorskip("transformers")
    check(2, ("llama",), (12, 7), {"cp": 2, "recompute": "blocks"}, method="ring")
    check(2, ("llama",), (12, 7), {"cp": 2}, method="ulysses")


def test_bf16() -> None:
    (want,) = alone(("decoder",), (12, 8), "bf16")
    for got in run_ranks(train, world=2, args=("decoder", (12, 8), {"cp": 2}, {"context": {"method": "ring"}}, "bf16")):
        assert got["losses"] == pytest.approx(want["losses"], abs=2e-2)


# -- random numbers, copies, gradients of inputs ---------------------------------------------------------------------


class DropsByHand(Rotary):
    """Drops without a dropout module; its attribute has no name that speaks of dropout."""

    def __init__(self):
        super().__init__()
        self.attn_drop = 0.5

    def forward(self, x, cos, sin, mask=None):
        return functional.dropout(super().forward(x, cos, sin, mask), self.attn_drop, self.training)


def drop(block) -> tuple[torch.Tensor, torch.Tensor, float]:
    accelerator = Accelerator(plan={"cp": 2}, options={"context": {"trial": False}}, cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(Decoder(block=block))
    kept = []
    first = accelerator.unwrap_model(model).layers[0]
    dropping = first if block is DropsByHand else first.drop
    dropping.register_forward_hook(lambda _, args, output: kept.append(output != 0))
    output = model(torch.ones(2, 16, dtype=torch.long))
    after = float(torch.rand(()))
    accelerator.end_training()
    return kept[-1], output.detach(), after


@pytest.mark.parametrize("block", [partial(Rotary, dropout=0.5), DropsByHand], ids=["module", "function"])
def test_ranks_drop_different_elements_inside_and_draw_the_same_outside(block) -> None:
    (mask0, output0, after0), (mask1, output1, after1) = run_ranks(drop, world=2, args=(block,))
    assert not torch.equal(mask0, mask1)
    assert torch.equal(output0, output1)
    assert after0 == after1


def copied() -> float:
    import copy

    accelerator = Accelerator(plan={"cp": 2}, cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(Decoder())
    tokens = torch.arange(12).view(1, 12)
    model(tokens)
    twin = copy.deepcopy(accelerator.unwrap_model(model))
    with torch.no_grad():
        twin.layers[0].o.bias.add_(1.0)
    changed = float((twin(tokens) - model(tokens)).detach().abs().max())
    accelerator.end_training()
    return changed


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    assert min(run_ranks(copied, world=2)) > 0.01


# -- what cannot be divided ------------------------------------------------------------------------------------------


class ByHand(Rotary):
    def forward(self, x, cos, sin, mask=None):
        q, k = self.q(x), self.up(x)
        return x + (q @ k.transpose(1, 2)).softmax(-1) @ self.o(x)


class SometimesByHand(Rotary):
    def forward(self, x, cos, sin, mask=None):
        return ByHand.forward(self, super().forward(x, cos, sin), cos, sin)


class CountsPositions(Rotary):
    def forward(self, x, cos, sin, mask=None):
        angles = torch.arange(x.shape[1])[:, None] * torch.ones(3)
        return super().forward(x, angles.cos(), angles.sin())


class Convolves(Rotary):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x, cos, sin, mask=None):
        return self.convolution(super().forward(x, cos, sin).transpose(1, 2)).transpose(1, 2)


class Crosses(Rotary):
    def forward(self, x, cos, sin, mask=None):
        q = heads_of(self.q(x), 4)
        memory = torch.zeros(x.shape[0], 4, 5, q.shape[-1])
        return x + imported_early(q, memory, memory).transpose(1, 2).flatten(2)


class DropsWeights(Rotary):
    def forward(self, x, cos, sin, mask=None):
        q = heads_of(self.q(x), 4)
        return x + imported_early(q, q, q, dropout_p=0.1).transpose(1, 2).flatten(2)


class MasksItself(Rotary):
    def forward(self, x, cos, sin, mask=None):
        return super().forward(x, cos, sin, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril())


class WantsWeights(nn.MultiheadAttention):
    def __init__(self):
        super().__init__(WIDTH, 4, batch_first=True)

    def forward(self, x, cos, sin, mask=None):
        return x + super().forward(x, x, x)[0]


class Recomputes(Rotary):
    gradient_checkpointing = True


class Skips(Decoder):
    def forward(self, tokens):
        x, angles = self.embed(tokens), torch.ones(tokens.shape[1], 3)
        return self.layers[1](x, angles, angles)


class TwoSizes(Decoder):
    def forward(self, tokens):
        return self.layers[0](self.embed(tokens), torch.ones(tokens.shape[1]), torch.ones(tokens.shape[1]))


class Keeps(Rotary):
    """Appends its inputs to those of earlier calls, in a cache of the caller's."""

    def forward(self, x, cos, sin, mask=None, past_key_values=None):
        if past_key_values is None:
            return super().forward(x, cos, sin, mask)
        past_key_values.append(x)
        return super().forward(torch.cat(past_key_values, 1), cos, sin, mask)[:, -x.shape[1] :]


class Decodes(Decoder):
    """A decoder that can go on where it was."""

    def forward(self, tokens, kept=None):
        start = kept[0][0].shape[1] + sum(x.shape[1] for x in kept[0][1:]) if kept and kept[0] else 0
        x, length = self.embed(tokens), start + tokens.shape[1]
        angles = torch.arange(length)[:, None] * torch.tensor([1.0, 0.3, 0.1])
        for block, past in zip(self.layers, kept or [None] * len(self.layers), strict=True):
            x = block(x, angles.cos(), angles.sin(), past_key_values=past)
        return self.head(self.norm(x))


def decode(world: int) -> tuple[list[Any], list[Any]]:
    accelerator = Accelerator(plan={"cp": world}, cpu=True)
    torch.manual_seed(0)
    model = Decodes(block=Keeps)
    reference = [p.detach().clone() for p in model.parameters()]
    model = accelerator.prepare(model)
    plain = Decodes(block=Keeps)
    for mine, given in zip(plain.parameters(), reference, strict=True):
        mine.data.copy_(given)
    prompt, found = torch.tensor([[1, 2, 3, 4, 5]]), []
    with torch.no_grad():
        for each in (model, plain):
            growing = [each(prompt[:, :length]) for length in range(1, 6)]
            kept: Any = [[], []]
            kept_ones = [each(prompt[:, :3], kept), each(prompt[:, 3:4], kept), each(prompt[:, 4:], kept)]
            found.append(growing + kept_ones)
    return found[0], found[1]


def test_without_gradients_short_sequences_and_caches_are_computed_whole() -> None:
    for found, want in run_ranks(decode, world=2, args=(2,)):
        for mine, reference in zip(found, want, strict=True):
            torch.testing.assert_close(mine, reference, atol=2e-6, rtol=0)


class Flat(nn.Module):
    """Blocks without a sequence: [batch, features], or images [batch, channels, height, width]."""

    def __init__(self, images):
        super().__init__()
        self.images = images
        make = (lambda: nn.Conv2d(8, 8, 3, padding=1)) if images else (lambda: nn.Linear(8, 8))
        self.layers = nn.ModuleList(nn.Sequential(make(), nn.Tanh()) for _ in range(3))

    def forward(self, tokens):
        x = tokens.float()
        x = x[:, :, None, None].expand(-1, -1, 4, 4) if self.images else x
        for layer in self.layers:
            x = layer(x)
        return x


REFUSED = [
    ("features", lambda: Flat(images=False), {"trial": False}, (2, 8), "context-dimension"),
    ("images", lambda: Flat(images=True), {}, (2, 8), "context-dimension"),
    ("by hand", lambda: Decoder(block=ByHand), {"trial": False}, (2, 8), "context-attention"),
    ("by hand, tried", lambda: Decoder(block=ByHand), {}, (2, 8), "context-differs"),
    ("by hand besides", lambda: Decoder(block=SometimesByHand), {}, (2, 64), "context-differs"),
    ("own positions", lambda: Decoder(block=CountsPositions), {}, (2, 8), "context-differs"),
    ("convolution", lambda: Decoder(block=Convolves), {}, (2, 40), "context-differs"),
    ("cross", lambda: Decoder(block=Crosses), {}, (2, 8), "context-attention"),
    ("dropout", lambda: Decoder(block=DropsWeights), {"method": "ring"}, (2, 8), "context-attention"),
    ("own mask", lambda: Decoder(block=MasksItself), {}, (2, 8), "context-attention"),
    ("weights", lambda: Decoder(block=WantsWeights), {}, (2, 8), "context-attention"),
    ("recompute", lambda: Decoder(block=Recomputes), {}, (2, 8), "context-recompute"),
    ("order", Skips, {}, (2, 8), "context-order"),
    ("ambiguous", TwoSizes, {}, (8, 8), "context-ambiguous"),
    ("short", Decoder, {}, (2, 3), "context-length"),
    ("pattern", Decoder, {"blocks": "stages.*"}, (2, 8), "context-blocks"),
    ("no tensor", Decoder, {"blocks": "he?d"}, (2, 8), "context-attention"),
    ("heads", lambda: Decoder(layers=2), {"method": "ulysses", "cp": 3}, (2, 12), "context-heads"),
]


def refuse(world: int) -> list[tuple[str, str]]:
    found = []
    for name, make, given, shape, _ in REFUSED:
        options = dict(given)
        if options.pop("cp", 2) != world:
            continue
        accelerator = Accelerator(plan={"cp": world}, options={"context": options}, cpu=True)
        torch.manual_seed(0)
        try:
            model = accelerator.prepare(make())
            model(torch.arange(shape[0] * shape[1]).view(shape) % VOCABULARY)
            found.append((name, "nothing"))
        except (TrainError, PlanError) as error:
            assert "\n  why: " in str(error) and "\n  fix: " in str(error)
            found.append((name, error.code))
    dist.barrier()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_what_cannot_be_divided_is_refused_on_every_rank(world: int) -> None:
    want = [(name, code) for name, _, given, _, code in REFUSED if given.get("cp", 2) == world]
    for found in run_ranks(refuse, world=world, args=(world,)):
        assert found == want


def drift(plan: dict[str, int]) -> tuple[int, list[torch.Tensor]]:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    accelerator = Accelerator(plan=plan, cpu=True)
    model = Decoder(block=lambda: Rotary(0.2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    # Both ranks have read the same samples, and a sum counts them twice, which is told.
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    assert accelerator.reduce(torch.tensor(3)) == 6
    assert accelerator.is_main_process == ("is 2 times as large" in " ".join(warnings))
    own = set_seed(5, device_specific=True)
    for _ in range(2):
        accelerator.backward(model(torch.arange(16).view(2, 8) % VOCABULARY).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return own, [p.detach().clone() for p in whole] + [torch.get_rng_state()]


@pytest.mark.parametrize("plan", [{"cp": 2}, {"tp": 2}])
def test_peers_with_seeds_of_their_own_drop_alike_and_stay_alike(plan: dict[str, int]) -> None:
    (first, a), (second, b) = run_ranks(drift, world=2, args=(plan,))
    assert first == second == 5
    assert all(x.equal(y) for x, y in zip(a, b, strict=True))
