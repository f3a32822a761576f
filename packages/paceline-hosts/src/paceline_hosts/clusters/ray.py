"""Settings that `paceline launch --on ray` takes in addition to those of all launchers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.kinds import matching, one_of, seconds, whole
from paceline.config.settings import setting

_GROUP = "Ray"
_AMOUNT = r"[^=,\s]+=\d+(\.\d+)?"


@dataclass(frozen=True)
class RaySettings:
    """Settings of jobs that Ray runs."""

    ray_address: str | None = setting(
        None, matching(r"\S+", "HOST:PORT, or local", "HOST:PORT|local"),
        "Head node of the Ray cluster; local: a new cluster on this host for this command; not set: RAY_ADDRESS, or the "
        "cluster that runs on this host.", _GROUP,
    )  # fmt: skip
    ray_cpus: int = setting(1, whole(1), "CPUs to request from Ray for each process.", _GROUP)
    ray_resources: str = setting(
        "", matching(f"|{_AMOUNT}(,{_AMOUNT})*", "NAME=AMOUNT pairs joined by commas", "NAME=AMOUNT,..."),
        "Further resources of each node, such as accelerator_type:H100=0.001.", _GROUP,
    )  # fmt: skip
    ray_strategy: str = setting(
        "strict_spread", one_of("strict_spread", "spread", "pack"),
        "Where the placement group puts the --nodes: each on another node of the cluster, on different nodes where possible, "
        "or on few nodes.", _GROUP,
    )  # fmt: skip
    ray_wait_s: float | None = setting(
        None, seconds(),
        "Seconds to wait for free resources, even if the cluster is too small now; not set: without limit, if the cluster is "
        "large enough.", _GROUP,
    )  # fmt: skip


SETTINGS = RaySettings
