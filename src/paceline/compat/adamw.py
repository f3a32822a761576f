"""`AdamW` with the arguments and defaults that transformers' own had; transformers 5 no longer has it."""

from __future__ import annotations

from typing import Any

import torch

from paceline.base.log import warn_once
from paceline.compat.absent import refuse


class AdamW(torch.optim.AdamW):
    """torch's AdamW behind transformers' old signature.

    Args:
        params: as for torch.
        lr, betas, eps, weight_decay: as for torch, with the old defaults.
        correct_bias: must be True; torch has no other form.
        no_deprecation_warning: taken and ignored.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        if not correct_bias:
            refuse(
                "transformers.AdamW(correct_bias=False)",
                "transformers 5 has no AdamW; torch's stands in, which always corrects its averages",
                "leave correct_bias out",
            )
        warn_once("compat", "transformers no longer has AdamW; torch.optim.AdamW stands in. Import that one.")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
