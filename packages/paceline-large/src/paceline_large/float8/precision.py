"""`fp8`: products of matrices in float8, everything else in bfloat16 or float32.

Which layers multiply in float8, and how, is the business of the strategy `fp8` (`parallel/fp8.py`). Here is the rest of the
arithmetic: autocast to bfloat16, or none where the plan says `float32`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from paceline.plan.plan import Decision, Plan
from paceline.precision.policy import Precision


class Float8Precision(Precision):
    """The precision of everything that is not multiplied in float8."""

    def under(self, options: Mapping[str, Any]) -> Precision:
        """Returns this precision, without autocast where the option `dtype` is float32."""
        if options.get("dtype") == "float32":
            return replace(self, dtype=None)
        return self

    def settle(self, plan: Plan, accelerated: bool) -> Plan:
        """Decides the option `dtype`: bfloat16 gains nothing on a CPU, where float8 is there to try what runs elsewhere."""
        options = plan.options.get("fp8", {})
        if options.get("dtype", "auto") != "auto":
            return plan
        dtype = "bf16" if accelerated else "float32"
        reason = f"everything that is not multiplied in float8, on {'an accelerator' if accelerated else 'the CPU'}"
        decision = Decision("options.fp8.dtype", dtype, "derived", reason=reason)
        others = [other for other in plan.decisions if other.field != decision.field]
        return replace(
            plan, options={**plan.options, "fp8": {**options, "dtype": dtype}}, decisions=(*others, decision)
        )


PRECISION = Float8Precision("fp8", torch.bfloat16)
