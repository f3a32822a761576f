"""`AdamW` with the arguments and defaults of transformers' own, which transformers 5 no longer has.

Scripts for older releases import it from transformers; `paceline.compat` serves it there.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.base.log import warn_once
from paceline.compat.absent import refuse


class AdamW(torch.optim.AdamW):
    """torch's AdamW with transformers' old signature.

    Args:
        params: as for torch.
        lr, betas, eps, weight_decay: as for torch, with the old defaults.
        correct_bias: must be True, because torch always corrects the bias.
        no_deprecation_warning: has no effect.

    Raises:
        CompatError: `compat-name`, for `correct_bias=False`.
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
