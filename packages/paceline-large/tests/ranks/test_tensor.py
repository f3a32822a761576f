"""Tensor parallel on real processes: the numbers of one plain process, for models that are written in several ways."""

import logging
import warnings
from contextlib import contextmanager, suppress
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from late_module import LateModule
from shared_ranks import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline import testing

# Loaded before the ranks are forked: each would need two seconds for it.
LLAMA = LateModule("transformers.models.llama.modeling_llama", optional=True)
GPT2 = LateModule("transformers.models.gpt2.modeling_gpt2", optional=True)
VOCABULARY, POSITIONS, WIDTH, HEADS = 24, 8, 16, 4
STEPS, BATCH = 3, 4


class Attention(nn.Module):
    """Separate q, k, v; counts its heads by `n_heads`."""

    def __init__(self, drop=0.0):
        super().__init__()
        self.n_heads, self.drop = HEADS, drop
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def heads(self, y):
        return y.view(*y.shape[:2], self.n_heads, -1).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.heads(layer(x)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.drop if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """q, k and v in one matrix, and the sizes of the input in the code: nothing of it can be split."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = HEADS, WIDTH
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (
            y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
            for y in self.c_attn(x).split(self.n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Literal(Attention):
    """Separate q, k, v, but the code takes the width from its input."""

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (
            layer(x).view(b, t, self.n_heads, c // self.n_heads).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.fc1, self.fc2, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(drop)

    def forward(self, x):
        return self.fc2(self.dropout(F.gelu(self.fc1(x))))


class Hidden(MLP):
    """Softmax over all features between the layers: a share of them is not enough."""

    def forward(self, x):
        return self.fc2(torch.softmax(self.fc1(x), -1))


class Block(nn.Module):
    def __init__(self, attention, mlp, drop=0.0):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp, self.drop = attention, mlp, nn.Dropout(drop)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.mlp(self.ln2(x)))


class GPT(nn.Module):
    """Learned positions as a bare parameter; the head may be tied to the embedding."""

    def __init__(self, attention=Attention, mlp=MLP, tied=False, drop=0.0, vocabulary=VOCABULARY):
        super().__init__()
        self.tok = nn.Embedding(vocabulary, WIDTH)
        self.pos = nn.Parameter(torch.randn(POSITIONS, WIDTH) * 0.02)
        options = {"drop": drop} if drop else {}
        self.blocks = nn.ModuleList(Block(attention(**options), mlp(**options), drop) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RMSNorm(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class GroupedAttention(nn.Module):
    """Fewer key-value heads, rotary positions, a norm of each head; counts by `head_dim`."""

    def __init__(self):
        super().__init__()
        self.head_dim, self.n_rep = WIDTH // HEADS, 2
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)

    def forward(self, x, turns):
        q, k, v = (w(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(self.q_norm(q), turns), rotate(self.k_norm(k), turns)
        k, v = k.repeat_interleave(self.n_rep, 1), v.repeat_interleave(self.n_rep, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def rotate(x, turns):
    a, b = x.chunk(2, -1)
    return torch.cat((a * turns.cos() - b * turns.sin(), a * turns.sin() + b * turns.cos()), -1)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(a, b, bias=False) for a, b in ((WIDTH, 24), (24, WIDTH), (WIDTH, 24)))

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class RotaryBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attention, self.feed_forward = GroupedAttention(), Gated()

    def forward(self, x, turns):
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(RotaryBlock() for _ in range(2))
        self.norm, self.output = RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("turns", torch.outer(torch.arange(POSITIONS) + 1.0, torch.tensor([1.0, 0.3])))

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.turns[: tokens.shape[1]])
        return self.output(self.norm(x))


class Torch(nn.Module):
    """torch's own encoder layers: attention with a fused matrix stays whole."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.encoder(self.tok(tokens)))


def transformers_model(**options):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def transformers_gpt2():
    transformers = pytest.importorskip("transformers")
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=WIDTH, n_layer=2, n_head=HEADS, **none
    )
    config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def batches():
    generator = torch.Generator().manual_seed(5)
    for _ in range(2 * STEPS):
        tokens = torch.randint(0, VOCABULARY, (BATCH, POSITIONS + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def logits_of(output):
    return output.logits if hasattr(output, "logits") else output


@contextmanager
def warned():
    """The warnings of `paceline.parallel` while it is open."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("paceline.parallel").addHandler(handler)
    yield told
    logging.getLogger("paceline.parallel").removeHandler(handler)


@cache
def plain(make, accumulate=1, clip=0.05):
    """One process without Paceline."""
    torch.manual_seed(7)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)  # the bias of k has no gradient but noise
    losses, norms = [], []
    for number, (x, y) in enumerate(batches()):
        loss = F.cross_entropy(logits_of(model(x)).flatten(0, 1), y.flatten())
        (loss / accumulate).backward()
        losses.append(float(loss.detach()))
        if (number + 1) % accumulate == 0:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def ours(make, options=None, accumulate=1, clip=0.05, precision="no", plan=None, seed=7):
    """The same loop under a plan; also what was decided and warned of."""
    from paceline import Accelerator

    torch.manual_seed(seed + (dist.get_rank() if seed != 7 else 0))
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)  # the bias of k has no gradient but noise
    told = {"tp": dist.get_world_size()} if plan is None else plan
    accelerator = Accelerator(precision, accumulate, plan=told, options={"tensor": options or {}}, cpu=True)
    names = [name for name, _ in model.named_parameters()]
    model, optimizer = accelerator.prepare(model, optimizer)
    assert [name for name, _ in accelerator.unwrap_model(model).named_parameters()] == names
    losses, norms = [], []
    width, index = accelerator.plan.layout.width, accelerator.plan.layout.data_index(accelerator.process_index)
    with warned() as warnings:
        for x, y in batches():
            x, y = (part.chunk(width)[index] for part in (x, y))
            with accelerator.accumulate(model):
                loss = F.cross_entropy(logits_of(model(x)).flatten(0, 1), y.flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
    state = accelerator.get_state_dict(model)
    return losses, norms, state, [str(each) for each in accelerator.plan.decisions], warnings


def same(reference, found, off=2e-6):
    assert found[0] == pytest.approx(reference[0], abs=off, rel=off)
    assert found[1] == pytest.approx(reference[1], abs=off * 10, rel=off)
    assert set(found[2]) == set(reference[2])
    for name, value in reference[2].items():
        torch.testing.assert_close(
            found[2][name], value, atol=off, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def tied():
    return GPT(tied=True)


def fused():
    return GPT(Fused)


def literal():
    return GPT(Literal)


def hidden():
    return GPT(mlp=Hidden)


class Listed(GPT):
    """A list of parameters, which the model's forward reads: they stay plain tensors."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(WIDTH))])

    def forward(self, tokens):
        return super().forward(tokens) * self.scales[0].sum() / WIDTH


def odd():
    return GPT(vocabulary=VOCABULARY + 1)


def huggingface():
    return transformers_model()


def huggingface_tied():
    return transformers_model(tie_word_embeddings=True)


@pytest.mark.parametrize("make", [GPT, tied, fused, odd, Torch, huggingface, huggingface_tied, transformers_gpt2])
def test_two_ranks_give_the_numbers_of_one(make):
    for found in run_ranks(ours, 2, args=(make,), timeout_s=80):
        same(plain(make), found)
        assert not found[4]


def test_grouped_heads_and_norms_inside_an_attention():
    for found in run_ranks(ours, 2, args=[Llama]):
        same(plain(Llama), found)
        assert any("partial" in line for line in found[3])


class OneKey(GroupedAttention):
    """One key-value head for all queries, with biases."""

    def __init__(self):
        super().__init__()
        self.n_rep = HEADS
        self.wk, self.wv = nn.Linear(WIDTH, WIDTH // HEADS), nn.Linear(WIDTH, WIDTH // HEADS)


class Counted(GroupedAttention):
    """Counts heads by a number of its own, so that it cannot compute a share of them."""

    def forward(self, x, turns):
        assert self.wq(x).shape[-1] == WIDTH
        return super().forward(x, turns)


def one_key():
    model = Llama()
    for layer in model.layers:
        layer.attention = OneKey()
    return model


def counted():
    model = Llama()
    for layer in model.layers:
        layer.attention = Counted()
    return model


def shared_in_turn(makes, options):
    return [ours(make, options) for make in makes]


@pytest.mark.parametrize(("size", "options"), [(2, {}), (4, {}), (4, {"sequence": True})])
def test_more_ranks_than_key_value_heads(size, options):
    makes = [one_key, counted]
    if size == 4:
        makes += [Llama, huggingface]
    for results in run_ranks(shared_in_turn, size, args=[makes, options]):
        for make, found in zip(makes, results, strict=True):
            same(plain(make), found)
            assert bool(found[4]) == (make is counted), make
            if make is not counted:
                assert any("shared_heads" in line for line in found[3])


def test_shared_heads_beside_shards_and_micro_batches():
    for found in run_ranks(ours, 4, args=[one_key, None, 2, 0.05, "no", {"tp": 2, "shard": 2}]):
        same(plain(one_key, 2), (plain(one_key, 2)[0], *found[1:]))


@pytest.mark.parametrize(("make", "reason"), [(literal, "shape"), (hidden, "differ")])
def test_code_that_needs_the_whole_is_noticed_and_computed_whole(make, reason):
    for found in run_ranks(ours, 2, args=[make]):
        same(plain(make), found)
        assert len(found[4]) == 1 and reason in found[4][0]


def hooked():
    """Hooks on a divided layer, on an activation behind it, and on a layer whose output is whole."""
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    kept = []
    table = {"0": "colwise", "2": "rowwise"}
    accelerator = paceline.Accelerator(cpu=True, plan={"tp": 2}, options={"tensor": {"plan": table}})
    with warned() as told:
        model = accelerator.prepare(mlp)
        for layer in mlp:
            layer.register_forward_hook(lambda _, inputs, output: kept.append(output))
        for _ in range(2):
            model(torch.ones(2, 4))
    return told


def test_a_hook_on_divided_features_is_told_of():
    told = run_ranks(hooked, 2)[0]  # rank 0 says it for all
    assert [line.partition(" sees")[0] for line in told] == ["a forward hook of 0", "a forward hook of 1"]


@pytest.mark.parametrize("make", [GPT, Llama])
def test_between_attentions_and_mlps_positions_are_divided(make):
    for found in run_ranks(ours, 2, args=[make, {"sequence": True}, 2]):
        same(plain(make, 2), found)


def test_four_ranks_with_positions_and_logits_divided():
    for found in run_ranks(ours, 4, args=[tied, {"sequence": "yes", "loss": "yes"}]):
        same(plain(tied), found)


def test_logits_stay_divided_over_the_vocabulary():
    def compute():
        from torch.distributed.tensor import DTensor

        from paceline import Accelerator

        torch.manual_seed(7)
        accelerator = Accelerator(plan={"tp": 2}, options={"tensor": {"loss": True}}, cpu=True)
        model = accelerator.prepare(GPT())
        x, y = next(batches())
        logits = model(x)
        assert isinstance(logits, DTensor) and logits.to_local().shape == (BATCH, POSITIONS, VOCABULARY // 2)
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return each.full_tensor().detach(), logits.argmax(-1).full_tensor()

    torch.manual_seed(7)
    x, y = next(batches())
    logits = GPT()(x)
    for each, best in run_ranks(compute, 2):
        torch.testing.assert_close(each, F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none"))
        assert best.equal(logits.argmax(-1))


def test_bfloat16():
    reference = plain(GPT)
    for found in run_ranks(ours, 2, args=[GPT, {}, 1, 0.05, "bf16"]):
        assert found[0] == pytest.approx(reference[0], abs=0.03)
        assert found[1] == pytest.approx(reference[1], rel=0.05)


def test_a_table_says_how():
    table = {
        "*.[qkv]_proj": "colwise",
        "*.o_proj": "rowwise",
        "*.fc1": "colwise_gather",
        "*.fc2": "rowwise_split",
        "tok": "vocabulary",
    }
    for found in run_ranks(ours, 2, args=[GPT, {"plan": table}]):
        same(plain(GPT), found)
        assert any("options.tensor.plan" in line for line in found[3])


def test_rank_0_has_the_last_word_on_weights():
    first, second = run_ranks(ours, 2, args=[GPT, {}, 1, 0.05, "no", None, 8])
    assert first[0] == second[0] and first[1] == second[1]
    for name, value in first[2].items():
        assert value.equal(second[2][name])


def test_each_rank_holds_its_part_and_the_whole_can_be_had(tmp_path):
    def compute():
        from paceline import Accelerator

        torch.manual_seed(7)
        model = GPT(tied=True)
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        accelerator = Accelerator(plan={"tp": 2}, cpu=True)
        prepared = accelerator.prepare(model)
        parts = {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}
        assert parts["tok.weight"] == (VOCABULARY // 2, WIDTH) and model.head.weight is model.tok.weight
        assert parts["blocks.0.attn.q_proj.weight"] == (WIDTH // 2, WIDTH)
        assert parts["blocks.1.mlp.fc2.weight"] == (WIDTH, 2 * WIDTH) and parts["blocks.1.mlp.fc2.bias"] == (WIDTH,)
        assert model.blocks[0].attn.n_heads == HEADS // 2
        x, _ = next(batches())
        before = prepared(x)
        with accelerator.full_parameters(prepared, writeback=True):
            assert model.blocks[0].attn.n_heads == HEADS and model.head.weight is model.tok.weight
            torch.testing.assert_close(model(x), before)  # forward computes on the whole here
            for parameter in model.parameters():
                parameter.data.mul_(4)
        with suppress(KeyError), accelerator.full_parameters(prepared, writeback=True):
            for parameter in model.parameters():
                parameter.data.div_(2)
            raise KeyError("what was changed before stays changed, as on one process")
        accelerator.save_model(prepared, tmp_path)
        for name, value in accelerator.get_state_dict(prepared).items():
            assert value.equal(2 * whole[name])
        return prepared(x)

    outputs = run_ranks(compute, 2)
    assert outputs[0].equal(outputs[1])
    from safetensors.torch import load_file

    torch.manual_seed(7)
    model = GPT(tied=True)
    saved = load_file(tmp_path / "model.safetensors")
    model.load_state_dict(saved, strict=False)
    torch.testing.assert_close(model(next(batches())[0]), outputs[0], atol=1e-4, rtol=1e-4)


def test_peers_drop_alike_outside_and_apart_inside():
    def compute():
        from paceline import Accelerator

        torch.manual_seed(dist.get_rank())
        model = GPT(drop=0.5)
        accelerator = Accelerator(plan={"tp": 2}, cpu=True)
        prepared = accelerator.prepare(model)
        seen = {}
        block = model.blocks[0]

        def note(name):
            def hook(module, inputs, output):
                if module.training:  # not while the division is proven
                    seen.setdefault(name, output == 0)

            return hook

        block.drop.register_forward_hook(note("outside"))
        block.mlp.dropout.register_forward_hook(note("inside"))
        first = prepared(next(batches())[0]).detach()
        return first, seen["outside"], seen["inside"], torch.rand(1)

    one, other = run_ranks(compute, 2)
    assert one[0].equal(other[0]) and one[1].equal(other[1]) and one[3].equal(other[3])
    assert not one[2].equal(other[2])


class Checkpointed(GPT):
    """Recomputes its blocks by torch's own function, as models of transformers do."""

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def test_recomputation_that_ends_early_closes_the_regions():
    def compute(drop):
        from paceline import Accelerator

        torch.manual_seed(3)
        model = Checkpointed(drop=drop)
        prepared = Accelerator(plan={"tp": 2}, cpu=True).prepare(model)
        # torch ends the recomputation of a block where its last tensor is there, inside the layer that ends a region.
        prepared(next(batches())[0]).sum().backward()
        inside = []
        model.blocks[0].mlp.dropout.register_forward_hook(lambda _, inputs, output: inside.append(output == 0))
        before = torch.get_rng_state()
        prepared(next(batches())[0])
        return before.equal(torch.get_rng_state()), inside[0]

    assert [unchanged for unchanged, _ in run_ranks(compute, 2, args=[0.0])] == [True, True]
    (_, one), (_, other) = run_ranks(compute, 2, args=[0.5])
    assert not one.equal(other)


def test_dropout_between_divided_positions_differs_by_rank():
    def compute():
        from paceline import Accelerator

        torch.manual_seed(3)
        model = GPT(drop=0.5)
        prepared = Accelerator(plan={"tp": 2}, options={"tensor": {"sequence": True}}, cpu=True).prepare(model)
        seen = []
        model.blocks[0].drop.register_forward_hook(lambda _, inputs, output: seen.append(output == 0))
        return prepared(next(batches())[0]).detach(), seen[0]

    one, other = run_ranks(compute, 2)
    assert one[1].shape == (BATCH, POSITIONS // 2, WIDTH) and not one[1].equal(other[1])
    assert one[0].equal(other[0])


def test_parameters_that_others_read_stay_plain():
    for found in run_ranks(ours, 2, args=[Listed]):
        same(plain(Listed), found)


def test_a_sequence_that_cannot_be_shared_is_refused():
    def compute():
        from paceline import Accelerator

        model = Accelerator(plan={"tp": 2}, options={"tensor": {"sequence": True}}, cpu=True).prepare(GPT())
        model(torch.zeros(2, 7, dtype=torch.long))

    with pytest.raises(testing.RankFailed, match="tensor-positions"):
        testing.run_ranks(compute, 2)


def test_a_checkpoint_resumes(tmp_path):
    def compute(path, resume):
        from paceline import Accelerator

        torch.manual_seed(7)
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        accelerator = Accelerator(plan={"tp": dist.get_world_size()}, cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        if resume:
            accelerator.load_state(path)
        losses = []
        for number, (x, y) in enumerate(batches()):
            if number == 3 and not resume:
                accelerator.save_state(path)
            if number >= 3 or not resume:
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        return losses

    path = str(tmp_path / "saved")
    straight = run_ranks(compute, 2, args=[path, False])[0]
    assert run_ranks(compute, 2, args=[path, True])[0] == pytest.approx(straight[3:], abs=1e-6)
    assert run_ranks(compute, 1, args=[path, True])[0] == pytest.approx(straight[3:], abs=1e-5)


def test_four_sums_a_layer(monkeypatch):
    def compute():
        from paceline import Accelerator

        prepared = Accelerator(plan={"tp": 2}, cpu=True).prepare(GPT())
        x, y = next(batches())
        prepared(x)  # proves the division
        sums, all_reduce = [], dist.all_reduce
        monkeypatch.setattr(
            dist, "all_reduce", lambda tensor, *a, **k: (sums.append(1), all_reduce(tensor, *a, **k))[1]
        )
        F.cross_entropy(prepared(x).flatten(0, 1), y.flatten()).backward()
        return len(sums)

    layers, embedding_and_head = 2, 2
    assert testing.run_ranks(compute, 2) == [4 * layers + embedding_and_head] * 2


def test_together_with_shards_of_the_divided_parameters():
    reference = plain(GPT, 2)
    for found in run_ranks(ours, 4, args=[GPT, {"sequence": True}, 2, 0.05, "no", {"tp": 2, "shard": 2}]):
        same((found[0], *reference[1:]), found)  # a rank's loss is that of its samples


def test_parts_of_a_model_without_weights_yet():
    def compute():
        from paceline.parallel.strategy import Context
        from paceline.plan.facts import model_facts
        from paceline.plan.plan import Plan
        from paceline.world.collectives import Collectives
        from paceline.world.layout import Layout
        from paceline.world.mesh import Mesh
        from paceline.world.world import World
        from paceline_large.tensor.tensor import STRATEGY

        with torch.device("meta"):
            model = GPT(tied=True)
        device = torch.device("cpu")
        layout = Layout(tp=2)
        plan, mesh = Plan(layout), Mesh(layout, World.detect(), "cpu")
        STRATEGY.apply(
            model,
            Context(
                plan,
                mesh,
                Collectives(World.detect(), device=device),
                device,
                model_facts(model),
                STRATEGY.options(plan),
            ),
        )
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.head.weight is model.tok.weight
        return tuple(model.blocks[0].mlp.fc1.weight.to_local().shape)

    assert run_ranks(compute, 2) == [(2 * WIDTH, WIDTH)] * 2


class ReadsTables(GPT):
    """Takes rows of its positions, without calling the module."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(POSITIONS, WIDTH)

    def forward(self, tokens):
        x = self.tok(tokens) + self.table.weight[: tokens.shape[1]] + self.pos[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ReadsDivided(GPT):
    """Computes logits with the embedding, which its head has the rows of."""

    def forward(self, tokens):
        return super().forward(tokens) + self.tok(tokens) @ self.tok.weight.T


def test_undivided_parameters_may_be_read_by_the_code_around():
    reference = plain(ReadsTables)
    for found in run_ranks(ours, 2, args=[ReadsTables]):
        same(reference, found)


def test_divided_parameters_may_not():
    def read():
        from paceline import Accelerator, TrainError

        model = Accelerator(plan={"tp": 2}, cpu=True).prepare(ReadsDivided())
        with pytest.raises(TrainError, match="forward computes with a divided parameter") as caught:
            model(torch.zeros(1, 4, dtype=torch.long))
        options = {"tensor": {"vocabulary": False}}
        whole = Accelerator(plan={"tp": 2}, options=options, cpu=True).prepare(ReadsDivided())
        return caught.value.code, tuple(whole(torch.zeros(1, 4, dtype=torch.long)).shape)

    assert run_ranks(read, 2) == [("tensor-mixed", (1, 4, VOCABULARY))] * 2


def codes_of_transforms():
    paceline.set_seed(0)
    accelerator = paceline.Accelerator(cpu=True, plan={"tp": 2})
    model = accelerator.prepare(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2))
    x = torch.randn(2, 5, 8)

    def with_forward_derivatives():
        with torch.autograd.forward_ad.dual_level():
            model(torch.autograd.forward_ad.make_dual(x, x))

    calls = (
        lambda: torch.vmap(lambda row: model(row[None])[0], randomness="different")(x),
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.grad(lambda given: model(given).sum())(x),
        with_forward_derivatives,
        lambda: model(x),
    )
    warnings.simplefilter("ignore", DeprecationWarning)  # torch uses its own `torch.jit.script` for forward derivatives
    codes = []
    for call in calls:
        try:
            call()
            codes.append("ran")
        except paceline.PacelineError as error:
            codes.append(error.code)
    return codes


def test_transforms_of_functions_are_refused():
    assert run_ranks(codes_of_transforms, 2) == [["tensor-transform"] * 4 + ["ran"]] * 2
