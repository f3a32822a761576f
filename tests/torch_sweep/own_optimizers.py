"""Small optimizers of the kinds that other packages have: whole matrices, blocks of memory, sums over all parameters."""

from __future__ import annotations

import torch
from torch import Tensor


class Shampoo(torch.optim.Optimizer):
    """Multiplies each matrix by inverse roots of its row and column statistics (Gupta et al., 2018)."""

    def __init__(self, params, lr: float = 0.1, eps: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.reshape(len(p), -1) if p.dim() else p.grad.reshape(1, 1)
                state = self.state[p]
                if not state:
                    state["left"] = group["eps"] * torch.eye(grad.shape[0], dtype=p.dtype)
                    state["right"] = group["eps"] * torch.eye(grad.shape[1], dtype=p.dtype)
                state["left"] += grad @ grad.T
                state["right"] += grad.T @ grad
                step = self.root(state["left"]) @ grad @ self.root(state["right"])
                p.add_(step.view(p.shape), alpha=-group["lr"])

    @staticmethod
    def root(matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values.clamp(min=1e-12) ** -0.25) @ vectors.T


class Soap(torch.optim.Optimizer):
    """Adam in the eigenbasis of the row statistics (Vyas et al., 2024)."""

    def __init__(self, params, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.reshape(len(p), -1) if p.dim() else p.grad.reshape(1, 1)
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["statistics"] = torch.diag(torch.linspace(0.1, 1, grad.shape[0], dtype=p.dtype))
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(grad)
                state["step"] += 1
                state["statistics"].lerp_(grad @ grad.T, 1 - second)
                basis = torch.linalg.eigh(state["statistics"])[1]
                state["exp_avg"].lerp_(p.grad, 1 - first)
                turned = basis.T @ grad
                state["exp_avg_sq"].mul_(second).addcmul_(turned, turned, value=1 - second)
                mean = basis.T @ state["exp_avg"].reshape(grad.shape)
                step = basis @ (mean / (state["exp_avg_sq"].sqrt() + 1e-8))
                p.add_(step.view(p.shape), alpha=-group["lr"])


class BlockWise(torch.optim.Optimizer):
    """SGD with a momentum that is kept in 8 bits, with one scale for a block of 5 elements, whatever rows they are in."""

    def __init__(self, params, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                flat = torch.nn.functional.pad(p.grad.reshape(-1), (0, -p.numel() % 5)).view(-1, 5)
                state = self.state[p]
                if not state:
                    state["codes"] = torch.zeros(flat.shape, dtype=torch.int8)
                    state["scales"] = torch.ones(len(flat), 1, dtype=p.dtype)
                momentum = 0.9 * state["codes"].to(p.dtype) * state["scales"] + flat
                state["scales"] = momentum.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
                state["codes"] = (momentum / state["scales"]).round().to(torch.int8)
                p.data = p.data - group["lr"] * momentum.view(-1)[: p.numel()].view(p.shape)


class Prodigy(torch.optim.Optimizer):
    """Finds its learning rate by sums over all parameters (Mishchenko and Defazio, 2023), in a short form."""

    def __init__(self, params, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "d": 1e-2, "numerator": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        denominator = 0.0
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["p0"], state["s"] = p.clone(), torch.zeros_like(p)
            group["numerator"] += group["d"] * float((p.grad * (state["p0"] - p)).sum())
            state["s"].add_(p.grad, alpha=group["d"])
            denominator += float(state["s"].abs().sum())
        if denominator:
            group["d"] = max(group["d"], group["numerator"] / denominator)
        for p in group["params"]:
            if p.grad is not None:
                p.add_(p.grad.sign(), alpha=-group["d"] * group["lr"])
