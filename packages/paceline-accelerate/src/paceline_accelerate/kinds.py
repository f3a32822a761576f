"""accelerate's enumerations.

Their members are strings where accelerate's are, because scripts compare them with plain strings.
"""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import Any


class EnumWithContains(EnumMeta):
    """Makes `"fp16" in PrecisionType` true for a value as well as for a member."""

    def __contains__(cls, item: object) -> bool:
        return any(item is member or item == member.value for member in cls)  # type: ignore[var-annotated]


class BaseEnum(Enum, metaclass=EnumWithContains):
    """An enumeration that prints as its values, which are strings."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> Any:
        """Returns all values."""
        return [member.value for member in cls]


class _StringBaseEnum(str, BaseEnum):
    """An enumeration of strings that prints as its values."""


class _StringEnum(str, Enum):  # noqa: UP042 - a StrEnum prints as its values
    """An enumeration of strings that prints as its members' names."""


def text_of(value: object) -> str:
    """Returns the text of an argument that may be a member of an enumeration or a plain value."""
    return str(getattr(value, "value", value))


def _enum(name: str, members: str, base: Any = BaseEnum) -> Any:
    """Makes an enumeration.

    Args:
        name: of the class.
        members: "NAME=value" for each, with blanks between; "NAME" alone has its name as its value.
        base: class of the enumeration.
    """
    values = {}
    for member in members.split():
        member_name, _, value = member.partition("=")
        values[member_name] = value or member_name
    return base(name, values, module=__name__)


DistributedType = _enum(
    "DistributedType",
    "NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU DEEPSPEED FSDP "
    "XLA MEGATRON_LM MULTI_HPU MULTI_NEURON",
    _StringEnum,
)


def type_of_processes(device_type: str, num_processes: int) -> Any:
    """Returns the `DistributedType` of processes that compute on devices of one type."""
    if num_processes == 1:
        return DistributedType.NO
    kind = "XLA" if device_type == "tpu" else f"MULTI_{device_type.upper()}"
    return getattr(DistributedType, kind, DistributedType.MULTI_GPU)


SageMakerDistributedType = _enum("SageMakerDistributedType", "NO DATA_PARALLEL MODEL_PARALLEL", _StringEnum)
ComputeEnvironment = _enum("ComputeEnvironment", "LOCAL_MACHINE AMAZON_SAGEMAKER", _StringEnum)
PrecisionType = _enum("PrecisionType", "NO=no FP8=fp8 FP16=fp16 BF16=bf16", _StringBaseEnum)
RNGType = _enum("RNGType", "TORCH=torch CUDA=cuda MLU=mlu SDAA=sdaa MUSA=musa NPU=npu XLA=xla XPU=xpu HPU=hpu "
                "NEURON=neuron GENERATOR=generator")  # fmt: skip
CustomDtype = _enum("CustomDtype", "FP8=fp8 INT4=int4 INT2=int2", Enum)
FP8BackendType = _enum("FP8BackendType", "NO TE MSAMP AO", _StringEnum)
LoggerType = _enum("LoggerType", "ALL=all AIM=aim TENSORBOARD=tensorboard WANDB=wandb TRACKIO=trackio COMETML=comet_ml "
                   "MLFLOW=mlflow CLEARML=clearml DVCLIVE=dvclive SWANLAB=swanlab")  # fmt: skip
DynamoBackend = _enum("DynamoBackend", "NO EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT "
                      "ONNXRT TENSORRT AOT_TORCHXLA_TRACE_ONCE TORCHXLA_TRACE_ONCE TVM HPU_BACKEND NEURON",
                      _StringBaseEnum)  # fmt: skip
DDPCommunicationHookType = _enum("DDPCommunicationHookType", "NO=no FP16=fp16 BF16=bf16 POWER_SGD=power_sgd "
                                 "BATCHED_POWER_SGD=batched_power_sgd")  # fmt: skip
