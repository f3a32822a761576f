"""A model and an optimizer whose parts every rank saves, and the step after it; under the real accelerate and under ours."""

import torch
from torch import nn


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(4, 6)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def weights(accelerator, model):
    return {name: value.flatten().tolist() for name, value in accelerator.get_state_dict(model).items()}
