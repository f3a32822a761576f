"""The types of devices: all that is known of a type by its name is one row of `DEVICES`.

What torch can be asked (how many there are, their memory, the module `torch.TYPE`) is not here. A type without a row works too,
if torch knows it: `device_type` returns a row with its name alone.

Of these types only the CPU has ever run Paceline; the others are simulated in tests (docs/concepts/devices.md).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceType:
    """One type of device.

    Attributes:
        name: torch's name of it.
        title: what users call one of them.
        visible: the variable that hides devices from a process; "" where there is none.
        backend: its backend of torch.distributed, where torch knows of none: that of the package which adds the type to torch.
        package: this package; "" where torch has the type itself.
        is_numbered: whether several of them in one host have numbers.
        has_streams: whether copies run beside the computation.
        compiles_flex: whether torch compiles `flex_attention` and its backward pass for it.
    """

    name: str
    title: str = ""
    visible: str = ""
    backend: str = ""
    package: str = ""
    is_numbered: bool = True
    has_streams: bool = True
    compiles_flex: bool = False


# Where these are from (looked up on 2026-11-30):
# - cuda: "rocm" is no type of torch's, whose builds for AMD call their devices cuda. HIP reads CUDA_VISIBLE_DEVICES, too
#   (rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html).
# - npu, xpu, mlu, sdaa, musa, hpu: what other libraries that run there set, see docs/concepts/devices.md. The backend of musa
#   is in the README of torch_musa, that of hpu in docs.habana.ai, "Distributed Backend Initialization".
# - tpu: torch_tpu's `common/environment.cc`: it sets TPU_VISIBLE_CHIPS itself, and of TPU_VISIBLE_DEVICES it takes a single
#   number alone; with a list each process takes the device of its local rank, so no variable hides several.
DEVICES = {
    "cpu": DeviceType("cpu", "CPU process", backend="gloo", is_numbered=False, has_streams=False),
    "meta": DeviceType("meta", is_numbered=False, has_streams=False),
    "cuda": DeviceType("cuda", "GPU", "CUDA_VISIBLE_DEVICES", "nccl", compiles_flex=True),
    "xpu": DeviceType("xpu", "XPU", "ZE_AFFINITY_MASK", "xccl", compiles_flex=True),
    "npu": DeviceType("npu", "NPU", "ASCEND_RT_VISIBLE_DEVICES", "hccl", "torch_npu"),
    "hpu": DeviceType("hpu", "HPU", "HABANA_VISIBLE_MODULES", "hccl", "habana_frameworks.torch"),
    "mps": DeviceType("mps", "MPS", backend="gloo", is_numbered=False, has_streams=False),
    "tpu": DeviceType("tpu", "TPU", "", "tpu_dist", "torch_tpu"),
    "mlu": DeviceType("mlu", "MLU", "MLU_VISIBLE_DEVICES", "cncl", "torch_mlu"),
    "musa": DeviceType("musa", "GPU", "MUSA_VISIBLE_DEVICES", "mccl", "torch_musa"),
    "sdaa": DeviceType("sdaa", "SDAA", "SDAA_VISIBLE_DEVICES", "tccl", "torch_sdaa"),
}
ACCELERATORS = tuple(name for name in DEVICES if name not in ("cpu", "meta"))


def device_type(name: str) -> DeviceType:
    """Returns what is known of a type, by torch's name of it."""
    return DEVICES.get(name) or DeviceType(name, name.upper())
