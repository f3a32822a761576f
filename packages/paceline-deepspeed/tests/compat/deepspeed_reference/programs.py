"""Training under DeepSpeed's interface; the same file runs under the real library (`record.py`) and under ours."""

import json

import cases
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Causal attention of two heads, and an MLP."""

    def __init__(self, width):
        super().__init__()
        self.mixed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.mixed(self.first(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """Two blocks over 17 words."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(17, 16)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, 17)

    def forward(self, words):
        return self.head(self.blocks(self.words(words)))


def mlp():
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 1))


def batch(model, number, rank):
    """Four rows of one micro-batch of one rank, with their target."""
    draw = torch.Generator().manual_seed(1000 * number + rank)
    if model == "transformer":
        words = torch.randint(0, 17, (4, 9), generator=draw)
        return words[:, :-1], words[:, 1:]
    x = torch.randn(4, 10, generator=draw)
    return x, x.sum(1, keepdim=True).sin() * 2


def loss_of(model, output, target):
    """In float32, as it is computed in any precision."""
    if model == "transformer":
        return functional.cross_entropy(output.float().flatten(0, 1), target.flatten())
    return functional.mse_loss(output.float(), target)


def train(model, steps, config, overflows=()):
    """Losses of both ranks, norms, rates and loss scales of each step."""
    import deepspeed

    torch.manual_seed(11)
    net = mlp() if model == "mlp" else Transformer()
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=json.loads(json.dumps(config))
    )
    accumulate = engine.gradient_accumulation_steps()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(next((k for k in ("bf16", "fp16") if k in config), ""))
    seen = {"losses": [], "norms": [], "rates": []}
    scales = []
    for step in range(steps):
        losses = []
        if overflows:
            scales.append(float(engine.optimizer.cur_scale))
        seen["rates"].append(engine.get_lr()[0])
        for part in range(accumulate):
            x, y = batch(model, step * accumulate + part, dist.get_rank())
            x = x if dtype is None or model == "transformer" else x.to(dtype)
            loss = loss_of(model, engine(x), y) * (1e30 if step in overflows else 1.0)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        everyone = [None, None]
        dist.all_gather_object(everyone, losses)
        seen["losses"].append([round(each, 8) for rank in everyone for each in rank])
        norm = engine.get_global_grad_norm()  # the real one has none at stage 0 in float32
        seen["norms"] += [] if norm is None or not config["gradient_clipping"] else [round(float(norm), 8)]
    if overflows:
        return {"scales": scales, "skipped": engine.skipped_steps, "steps": engine.global_steps}
    return seen


def parts():
    """Where `PipelineModule` puts its layers."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    def split(method):
        layers = [LayerSpec(nn.Embedding, 40, 8)]
        layers += [LayerSpec(kind, *sizes) for _ in range(3) for kind, sizes in ((nn.Linear, (8, 8)), (nn.ReLU, ()))]
        layers += [LayerSpec(nn.Linear, 8, 40)]
        return [int(each) for each in PipelineModule(layers, num_stages=2, partition_method=method).parts]

    return {method: split(method) for method in ("uniform", "parameters", "type:linear", "type:^(embedding|relu)$")}


def everything(names=None):
    """All of it, or the cases of these names."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    found = {}
    for name, case in cases.TRAINING.items():
        if names is None or name in names:
            found[name] = train(*case)
    for name, case in cases.FP16_TRAINING.items():
        if names is None or name in names:
            found[name] = train(*case, overflows=cases.FP16_OVERFLOWS)
    if names is None or "parts" in names:
        found["parts"] = parts()
    return found
