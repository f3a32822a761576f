"""`calibration_of` makes a calibration of a device's datasheet, for forecasts of machines that nobody measured.

No program reaches the rates of a datasheet. The shares below are assumed for all devices, models and plans alike; they are not
fitted to any run. A forecast is made with both of them, and its answer lies between.

What a step of Llama 3 took where others published it, beside these forecasts: benchmarks/reports.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.plan.plan import Plan
from paceline_lens.forecast.calibration import BETWEEN_NODES, WITHIN_NODE, Calibration, Link, Machine
from paceline_lens.forecast.device import Device


@dataclass(frozen=True)
class Efficiency:
    """Which share of its datasheet's rates a device reaches.

    Attributes:
        products: of its FLOP/s, in large products of matrices.
        attention: the rate of attention kernels, as a share of that of products.
        memory: of its memory's bytes/s, in operations that compute little.
        links: of the bytes/s of its links, in large messages.
        joined: under torch.compile, the share of what can be joined of operations that is joined.
        hidden: the share of communication that is hidden by computing, where it may travel beside it.
    """

    products: float
    attention: float
    memory: float
    links: float
    joined: float
    hidden: float


SLOW = Efficiency(products=0.60, attention=0.6, memory=0.70, links=0.6, joined=0.7, hidden=0.8)
FAST = Efficiency(products=0.75, attention=0.7, memory=0.85, links=0.8, joined=1.0, hidden=1.0)

_HALF = ("bfloat16", "float16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_FLOAT8_RATE = (
    2.0  # times that of half precision, in datasheets; the scaling of tensors is counted as the bytes that it moves
)
_LATENCY_S = 30e-6  # of a collective
_KERNEL_S = 3e-6  # of an operation that has next to nothing to compute, on a device that never waits for the host


def calibration_of(device: Device, efficiency: Efficiency, plan: Plan) -> Calibration:
    """Returns what one rank on such a device computes, moves and sends in a second.

    Args:
        device: of each rank.
        efficiency: `SLOW` or `FAST`.
        plan: its precision, and whether `torch.compile` compiles the model.
    """
    half = ((1.0, device.half * efficiency.products),)
    float8 = half
    # An emulated recipe computes in half precision.
    if plan.options.get("fp8", {}).get("recipe", "rowwise_with_gw_hp") in device.float8:
        float8 = ((1.0, device.half * _FLOAT8_RATE * efficiency.products),)
    single = ((1.0, device.single * efficiency.products),)
    return Calibration(
        Machine("", device.name, "", 0, 0),
        measured=0.0,
        matrix={"float32": single, **dict.fromkeys(_HALF, half), **dict.fromkeys(_FLOAT8, float8)},
        memory=((1.0, device.bandwidth * efficiency.memory),),
        optimizer=device.bandwidth * efficiency.memory,
        overhead_s=_KERNEL_S,
        links={
            WITHIN_NODE: Link(_LATENCY_S, device.link * efficiency.links),
            BETWEEN_NODES: Link(_LATENCY_S, device.network * efficiency.links),
        },
        overlap=efficiency.hidden,
        attention=efficiency.attention,
        prefetches=True,
        joined=efficiency.joined if plan.compile else 0.0,
    )
