"""A small transformer under accelerate's FSDP; the same file runs under the real library and under ours.

    python record_fsdp.py                                                    (the real accelerate) -> recorded_fsdp.json
    paceline launch --compat accelerate --config fsdp.yaml fsdp_program.py   (ours)

Prints losses, norms of gradients and sums of weights; a key's bias has no gradient but noise, and is left out.
"""

import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, words=11, width=16):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(**arguments):
    set_seed(7)
    accelerator = Accelerator(cpu=True, **arguments)
    model = Model()
    ids = torch.arange(8 * 6).reshape(8, 6) % 11
    loader = DataLoader(TensorDataset(ids), batch_size=2 if accelerator.num_processes > 1 else 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = [], []
    for _ in range(3):
        for (batch,) in loader:
            out = model(batch)
            loss = nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
    state = accelerator.get_state_dict(model)
    sums = {name: value.double().sum().item() for name, value in state.items() if "in_proj_bias" not in name}
    return {"type": str(accelerator.distributed_type), "losses": losses, "norms": norms, "sums": sums}


if __name__ == "__main__":
    found = main()
    if Accelerator(cpu=True).is_main_process:
        print(json.dumps(found))
