"""`deepspeed.ops.op_builder`: what would compile DeepSpeed's kernels. Optimizers need none here, and nothing is compiled.

A script that compiles the kernel of an optimizer before it trains gets an empty module, and the optimizer works without it. The
other builders say that they are not compatible, so that a script which asks takes its other way.
"""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

from paceline_doors.absent import refuse


class OpBuilder:
    """Builds a kernel. The base class of all builders."""

    NAME: ClassVar[str] = ""

    def __init__(self, name: str = "") -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the kernel can be used."""
        return False

    def load(self, verbose: bool = True) -> ModuleType:
        """Compiles the kernel.

        Raises:
            CompatError: it is not carried.
        """
        refuse(
            f"The kernel {self.name!r}",
            "Paceline compiles no kernels of DeepSpeed's",
            f"ask first: `if {type(self).__name__}().is_compatible():`, and use an operation of torch otherwise",
        )


class _OptimizerBuilder(OpBuilder):
    """Stands for the kernel of an optimizer, which steps by torch."""

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = True) -> ModuleType:
        """Returns an empty module."""
        return ModuleType(self.name)


class CPUAdagradBuilder(_OptimizerBuilder):
    NAME = "cpu_adagrad"


class CPUAdamBuilder(_OptimizerBuilder):
    NAME = "cpu_adam"


class CPULionBuilder(_OptimizerBuilder):
    NAME = "cpu_lion"


class FusedAdamBuilder(_OptimizerBuilder):
    NAME = "fused_adam"


class FusedLambBuilder(_OptimizerBuilder):
    NAME = "fused_lamb"


class FusedLionBuilder(_OptimizerBuilder):
    NAME = "fused_lion"


class AsyncIOBuilder(OpBuilder):
    NAME = "async_io"


class GDSBuilder(OpBuilder):
    NAME = "gds"


class InferenceBuilder(OpBuilder):
    NAME = "transformer_inference"


class QuantizerBuilder(OpBuilder):
    NAME = "quantizer"


class RandomLTDBuilder(OpBuilder):
    NAME = "random_ltd"


class SpatialInferenceBuilder(OpBuilder):
    NAME = "spatial_inference"


class StochasticTransformerBuilder(OpBuilder):
    NAME = "stochastic_transformer"


class TransformerBuilder(OpBuilder):
    NAME = "transformer"


class UtilsBuilder(OpBuilder):
    NAME = "utils"


_BUILDERS: tuple[type[OpBuilder], ...] = (
    AsyncIOBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    FusedLambBuilder,
    FusedLionBuilder,
    GDSBuilder,
    InferenceBuilder,
    QuantizerBuilder,
    RandomLTDBuilder,
    SpatialInferenceBuilder,
    StochasticTransformerBuilder,
    TransformerBuilder,
    UtilsBuilder,
)
ALL_OPS: dict[str, OpBuilder] = {builder.NAME: builder() for builder in _BUILDERS}
