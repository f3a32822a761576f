"""accelerate's enumerations; where its members are strings, which compare with plain ones, they are here."""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import Any


class EnumWithContains(EnumMeta):
    """Lets `"fp16" in PrecisionType` be asked of values."""

    def __contains__(cls, item: object) -> bool:
        return any(item is member or item == member.value for member in cls)  # type: ignore[var-annotated]


class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enumeration that prints as its values, which are strings."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> Any:
        """All values."""
        return [member.value for member in cls]


class _Texts(str, BaseEnum):
    """One whose members are strings, too."""


class _Named(str, Enum):  # noqa: UP042 - a StrEnum prints as its values
    """An enumeration of strings that prints as its members' names."""


def _enum(name: str, members: str, kind: Any = BaseEnum) -> Any:
    """An enumeration whose members' values are their names, or `NAME=value`."""
    pairs = [member.partition("=") for member in members.split()]
    return kind(name, [(word, value or word) for word, _, value in pairs], module=__name__)


DistributedType = _enum(
    "DistributedType",
    "NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU DEEPSPEED FSDP "
    "XLA MEGATRON_LM MULTI_HPU MULTI_NEURON",
    _Named,
)
# The word for several processes of one machine, by the kind of device.
WORD_OF_DEVICE = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU", "npu": "MULTI_NPU", "mlu": "MULTI_MLU", "xpu": "MULTI_XPU",
                  "hpu": "MULTI_HPU", "musa": "MULTI_MUSA", "sdaa": "MULTI_SDAA"}  # fmt: skip
SageMakerDistributedType = _enum("SageMakerDistributedType", "NO DATA_PARALLEL MODEL_PARALLEL", _Named)
ComputeEnvironment = _enum("ComputeEnvironment", "LOCAL_MACHINE AMAZON_SAGEMAKER", _Named)
PrecisionType = _enum("PrecisionType", "NO=no FP8=fp8 FP16=fp16 BF16=bf16", _Texts)
RNGType = _enum("RNGType", "TORCH=torch CUDA=cuda MLU=mlu SDAA=sdaa MUSA=musa NPU=npu XLA=xla XPU=xpu HPU=hpu "
                "NEURON=neuron GENERATOR=generator")  # fmt: skip
CustomDtype = _enum("CustomDtype", "FP8=fp8 INT4=int4 INT2=int2", Enum)
FP8BackendType = _enum("FP8BackendType", "NO TE MSAMP AO", _Named)
LoggerType = _enum("LoggerType", "ALL=all AIM=aim TENSORBOARD=tensorboard WANDB=wandb TRACKIO=trackio COMETML=comet_ml "
                   "MLFLOW=mlflow CLEARML=clearml DVCLIVE=dvclive SWANLAB=swanlab")  # fmt: skip
DynamoBackend = _enum("DynamoBackend", "NO EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT "
                      "ONNXRT TENSORRT AOT_TORCHXLA_TRACE_ONCE TORCHXLA_TRACE_ONCE TVM HPU_BACKEND NEURON", _Texts)  # fmt: skip
DDPCommunicationHookType = _enum("DDPCommunicationHookType", "NO=no FP16=fp16 BF16=bf16 POWER_SGD=power_sgd "
                                 "BATCHED_POWER_SGD=batched_power_sgd")  # fmt: skip
