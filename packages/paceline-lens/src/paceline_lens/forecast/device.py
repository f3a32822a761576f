"""`Device`: what is known of a kind of accelerator, and how long a step takes on it at best.

Numbers are the makers' datasheets: memory in GiB as software sees it, dense matrix arithmetic in FLOP/s, one direction of
the links in bytes/s. They are upper bounds, and what follows from them is an estimate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from paceline.base.errors import ConfigError
from paceline.plan.plan import Plan

GIB = 2**30
RESERVE = 0.05  # of the memory, for the driver, the libraries and what lies between tensors


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Attributes:
        name: as it is given to `--device`.
        memory: bytes.
        half, single: FLOP/s of bf16 or fp16, and of float32 matrices.
        bandwidth: bytes/s that it reads and writes in its memory.
        float8: the recipes of `fp8` for which it has arithmetic; others are emulated, or not possible.
        link: bytes/s from one device to the others on its node.
        network: bytes/s from one device to other nodes.
    """

    name: str
    memory: int
    half: float
    single: float
    bandwidth: float
    link: float
    network: float
    float8: tuple[str, ...] = ()

    @property
    def usable(self) -> int:
        """Bytes that a run may take."""
        return int(self.memory * (1 - RESERVE))

    def seconds(self, flops: float, near: int, far: int, plan: Plan) -> tuple[float, float, float]:
        """Least time of a step for arithmetic, for what is sent within nodes and for what is sent between them."""
        return flops / self.rate(plan), near / self.link, far / self.network

    def rate(self, plan: Plan) -> float:
        """Returns the FLOP/s of the model's products in the precision of a plan."""
        if not plan.half:
            return self.single
        recipe = plan.options.get("fp8", {}).get("recipe", "rowwise_with_gw_hp")
        if plan.precision == "fp8" and recipe in self.float8:
            return self.half * FLOAT8_SPEEDUPS[recipe]
        return self.half


# How many times as fast a step is as in bf16, where it was published: torchtitan, Llama 3 of 8 billion parameters, compiled, on
# 8 H100 (5760 tokens/s in bf16, 6424 rowwise, 7186 tensorwise). MX blocks: torchao, the same model on 8 B200.
# Nothing is published for rowwise_with_gw_hp: two of the three products of rowwise are in float8, so it gains two thirds.
FLOAT8_SPEEDUPS = {"tensorwise": 1.25, "rowwise": 1.12, "rowwise_with_gw_hp": 1.07, "mxfp8": 1.16}
_ROWS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def _row(
    name: str,
    gib: int,
    half: float,
    single: float,
    bandwidth: float,
    link: float,
    network: float = 50e9,
    float8: tuple[str, ...] = (),
) -> Device:
    return Device(name, gib * GIB, half, single, bandwidth, link, network, float8)


TABLE = {
    row.name: row
    for row in (
        _row("a100-40GB", 40, 312e12, 19.5e12, 1.555e12, 300e9, 25e9),
        _row("a100-80GB", 80, 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
        _row("h100-80GB", 80, 989e12, 67e12, 3.35e12, 450e9, float8=_ROWS),
        _row("h200-141GB", 141, 989e12, 67e12, 4.8e12, 450e9, float8=_ROWS),
        _row("b200-180GB", 180, 2250e12, 80e12, 7.7e12, 900e9, float8=(*_ROWS, "mxfp8")),
        _row("l40s-48GB", 48, 362e12, 91e12, 0.864e12, 32e9, 25e9, float8=_ROWS),
        _row("mi250x-64GB", 64, 191e12, 48e12, 1.6e12, 100e9, 25e9),
        _row("mi300x-192GB", 192, 1307e12, 163e12, 5.3e12, 448e9, float8=_ROWS),
        # Intel, Hot Chips 2024: matrix rates, memory, and 24 ports of 100 and 200 Gbit/s, of which 21 stay within the host.
        _row("gaudi2-96GB", 96, 432e12, 54e12, 2.46e12, 262e9, 37e9),
        _row("gaudi3-128GB", 128, 1835e12, 115e12, 3.67e12, 525e9, 75e9),
        # docs.cloud.google.com/tpu/docs/v5e, v5p, v6e; links are half of what is published for both directions. No rate of
        # float32 is published: a product takes six passes in bf16.
        _row("v5e-16GB", 16, 197e12, 33e12, 0.819e12, 200e9, 25e9),
        _row("v5p-95GB", 95, 459e12, 76e12, 2.765e12, 600e9, 25e9),
        _row("v6e-32GB", 32, 918e12, 153e12, 1.64e12, 400e9, 25e9),
        _row("cpu-64GB", 64, 2e12, 1e12, 50e9, 10e9, 3e9),
    )
}


def device_of(text: str) -> Device:
    """Returns the device that a name means: one of `TABLE`, its beginning, or that with another memory, such as "a100-24GB".

    A name that is not in the table is refused even with its memory: nobody would see whose rates the times are of.

    Raises:
        ConfigError: `plan-device`.
    """
    word = text.strip().lower().replace("_", "-")
    for name, row in TABLE.items():
        if word in (name.lower(), name.lower().partition("-")[0]):
            return row
    sized = re.fullmatch(r"([a-z][\w-]*?)-(\d+)([gm])i?b", word)
    like = None
    if sized is not None:
        like = next((row for name, row in TABLE.items() if name.partition("-")[0] == sized[1]), None)
    if sized is None or like is None:
        memory = f"{sized[2]}{sized[3].upper()}B" if sized is not None else "24GB"
        raise ConfigError(
            "plan-device",
            f"there is no device called {text!r}.",
            why=f"known: {', '.join(TABLE)}",
            fix="use one of these; for another device write the one whose rates are nearest, with the memory of yours, "
            f"such as a100-{memory}",
        )
    return replace(like, name=word, memory=int(sized[2]) * (GIB if sized[3] == "g" else 2**20))
