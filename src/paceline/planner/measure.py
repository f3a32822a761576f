"""Measures a `Calibration` on the ranks at hand: probes, each run for a moment in several rounds, and the median of each.

All ranks run the same probe at the same time, since ranks of a host share its memory and, where there are fewer cores
than threads, its cores too. What counts is the slowest rank, for which a step waits.

    matrix     the three products of a linear layer, for 4 to 1024 rows, by dtype
    memory     `a + b` with 64 kB to 64 MB read and written, of tensors that no cache holds any more
    optimizer  a fused AdamW over 4 million parameters
    overhead   forward and backward passes of layers of 8 values, for each operation in them
    links      all-reduce and the other collectives of torch, and the sends in pairs of gloo's transport: small and large ones
    overlap    products of matrices while an all-reduce travels, beside either alone
    waiting    products of matrices and small all-reduces in turns, beside either alone
    alone      the linear layer of 64 rows on the first rank, while the others wait
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.planner.calibration import Calibration, Curve, Link, Machine
from paceline.torch_internals import dispatch
from paceline.world.transport import Transport, all_gather_single, reduce_scatter_single, transport_of

_MATRIX_ROWS = (4, 16, 64, 256, 1024)
_WIDTH = 512  # of the linear layer, which has four times as many outputs
_LAYERS = 8  # of them in turn: a step finds none of its weights in a cache
_DTYPES = (torch.float32, torch.bfloat16)
_ELEMENTS = (5_400, 87_000, 1_400_000, 5_600_000)  # of each of the three tensors of `a + b`
_SMALL_ELEMENTS, _LARGE_ELEMENTS = 256, 4 << 20
_OPTIMIZED = 4 << 20
_UNCACHED_ELEMENTS = 8 << 20  # which the operands of the memory's probes are spread over
_TURNS = 4  # of computing and waiting
_PROBE_S = 0.01  # a probe runs at least this long, so that the clock does not matter

Rounds = Sequence[dict[str, float]]
OfRounds = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Probe:
    """Something whose seconds are taken.

    Attributes:
        name: such as "matrix float32 512".
        amount: what it computes or moves, in FLOP or bytes.
        work: does it once.
        bytes: that a probe reads and writes beside its arithmetic.
        first_alone: whether the first rank runs it alone, while the others wait.
    """

    name: str
    amount: float
    work: Callable[[], object]
    bytes: float = 0.0
    first_alone: bool = False


class Probes:
    """The probes of this rank, ready to run.

    Args:
        device: where it computes.
        group: the ranks; None for this one alone.
        clock: tells seconds.

    Ranks: all make one, and call `round` equally often.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device, self._group, self._clock = device, group, clock
        self.size = 1 if group is None else dist.get_world_size(group)
        self.missing: list[str] = []
        self._probes = [*self._matrices(), *self._memory(), self._optimizer(), self._overhead()]
        if group is None:
            self.missing.append("links and overlap: there is one rank; `--procs 2` starts two")
        else:
            self._probes += self._links(group)
            self._probes += self._beside_computing(group)
            # Micro-batches of a pipeline have few rows.
            rows = _MATRIX_ROWS[len(_MATRIX_ROWS) // 2]
            of_all = next(probe for probe in self._probes if probe.name == f"matrix float32 {rows}")
            self._probes.append(replace(of_all, name=f"alone {of_all.name}", first_alone=True))
        self._times = self._repetitions()

    def _repetitions(self) -> dict[str, int]:
        """How often each probe runs in a round; the same on all ranks."""
        times: dict[str, int] = {}
        for probe in self._probes:
            self._run(probe, 1)
            seconds = self._slowest(self._run(probe, 1))
            times[probe.name] = max(1, min(1000, round(_PROBE_S / max(seconds, 1e-7))))
        return times

    def round(self) -> dict[str, float]:
        """Seconds of each probe on the slowest rank."""
        seconds: dict[str, float] = {}
        for probe in self._probes:
            if self._group is not None:
                dist.barrier(self._group)
            seconds[probe.name] = self._slowest(self._run(probe, self._times[probe.name]))
        return seconds

    def _run(self, probe: Probe, times: int) -> float:
        """Seconds of one of several runs; 0 on a rank that waits for the first one."""
        if probe.first_alone and dist.get_rank(self._group) > 0:
            return 0.0
        _wait_for(self._device)
        began = self._clock()
        for _ in range(times):
            probe.work()
        _wait_for(self._device)
        return (self._clock() - began) / times

    def _slowest(self, seconds: float) -> float:
        if self._group is None:
            return seconds
        of_ranks = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(of_ranks, dist.ReduceOp.MAX, self._group)
        return float(of_ranks)

    def calibration(
        self, rounds: Rounds, machine: Machine, now: float, of_rounds: OfRounds = statistics.median
    ) -> Calibration:
        """What the rounds say; arguments as of `calibration_of`."""
        calibration = calibration_of(self._probes, rounds, machine, now, of_rounds)
        return replace(calibration, missing=tuple(self.missing))

    # -- what is measured --------------------------------------------------------------------------------------

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(*shape, device=self._device).to(dtype)

    def _matrices(self) -> list[Probe]:
        probes: list[Probe] = []
        for dtype in _DTYPES:
            name = str(dtype).removeprefix("torch.")
            weights = [self._new(4 * _WIDTH, _WIDTH, dtype=dtype) for _ in range(_LAYERS)]
            for rows in _MATRIX_ROWS:
                inputs = self._new(rows, _WIDTH, dtype=dtype)
                gradients = self._new(rows, 4 * _WIDTH, dtype=dtype)
                flops = 3 * 2.0 * rows * 4 * _WIDTH**2
                moved = 3 * dtype.itemsize * (inputs.numel() + weights[0].numel() + gradients.numel())
                work = partial(_linear_layer, inputs, gradients, cycle(weights))
                probes.append(Probe(f"matrix {name} {rows}", flops, work, moved))
        return probes

    def _memory(self) -> list[Probe]:
        probes: list[Probe] = []
        for elements in _ELEMENTS:
            count = max(2, _UNCACHED_ELEMENTS // elements)
            operands = cycle(self._new(count, elements).unbind())
            probes.append(Probe(f"memory {elements}", 12.0 * elements, partial(_sum_of_next, operands)))
        return probes

    def _optimizer(self) -> Probe:
        parameter = torch.nn.Parameter(self._new(_OPTIMIZED))
        parameter.grad = self._new(_OPTIMIZED)
        step = torch.optim.AdamW([parameter], fused=True).step
        # It is declared to read and to write parameters, gradients and two states, and a trace counts it so.
        return Probe("optimizer", 8.0 * 4 * _OPTIMIZED, step)

    def _overhead(self) -> Probe:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()]
        model = nn.Sequential(*layers).to(self._device)
        inputs = self._new(4, 8)
        parameters = list(model.parameters())

        def passes() -> None:
            torch.autograd.grad(model(inputs).sum(), parameters)

        with _OperationCount() as operations:
            passes()
        return Probe("overhead", operations.count, passes)

    def _links(self, group: dist.ProcessGroup) -> list[Probe]:
        probes: list[Probe] = []
        for size, elements in (("small", _SMALL_ELEMENTS), ("large", _LARGE_ELEMENTS)):
            whole = self._new(elements // self.size * self.size)
            part = self._new(elements // self.size)
            count = 4.0 * whole.numel()
            others = (self.size - 1) / self.size
            transport = transport_of(group, self._device)
            works: dict[str, tuple[float, Callable[[], object]]] = {
                "allreduce": (2 * others * count, partial(dist.all_reduce, whole, group=group)),
                "allgather": (others * count, partial(all_gather_single, whole, part, group=group)),
                "reducescatter": (others * count, partial(reduce_scatter_single, part, whole, group=group)),
                "broadcast": (count, partial(dist.broadcast, whole, group=group, group_src=0)),
                "alltoall": (
                    others * count,
                    partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group),
                ),
                "send": (others * count, partial(_exchange, transport, whole, part)),
            }
            for name, (sent, work) in works.items():
                probes.append(Probe(f"link {name} {size}", sent, work))
        return probes

    def _beside_computing(self, group: dist.ProcessGroup) -> list[Probe]:
        """Computing alone, beside a message that travels, and in turns with messages for which it waits."""
        left, right, whole = self._new(512, 512), self._new(512, 512), self._new(_LARGE_ELEMENTS)
        small = self._new(_SMALL_ELEMENTS)

        def computing() -> None:
            for _ in range(4):
                torch.mm(left, right)

        def both() -> None:
            under_way = dist.all_reduce(whole, group=group, async_op=True)
            computing()
            assert under_way is not None
            under_way.wait()

        def in_turns() -> None:
            for _ in range(_TURNS):
                computing()
                dist.all_reduce(small, group=group)

        return [Probe("computing", 1.0, computing), Probe("overlap", 1.0, both), Probe("waiting", _TURNS, in_turns)]


class _OperationCount(dispatch.TorchDispatchMode):
    """Counts operations as a rehearsal does, backward passes and views included."""

    count = 0

    def __torch_dispatch__(
        self,
        operation: dispatch.Operation,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        self.count += 1
        return operation(*args, **(kwargs or {}))


def _linear_layer(inputs: Tensor, gradients: Tensor, weights: Iterator[Tensor]) -> None:
    """The output of a linear layer, the gradient of its inputs and that of its weight: one product each."""
    weight = next(weights)
    torch.mm(inputs, weight.t())
    torch.mm(gradients, weight)
    torch.mm(gradients.t(), inputs)


def _sum_of_next(operands: Iterator[Tensor]) -> Tensor:
    return next(operands) + next(operands)


def _exchange(transport: Transport, whole: Tensor, part: Tensor) -> None:
    """What every pair of ranks sends each other, as ZeRO and tensor parallel send it."""
    transport.all_gather(whole, part).wait()


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def calibration_of(
    probes: Sequence[Probe], rounds: Rounds, machine: Machine, now: float, of_rounds: OfRounds = statistics.median
) -> Calibration:
    """Rates from the seconds of probes. Pure.

    Args:
        probes: what was run.
        rounds: seconds of each probe by its name, several times.
        machine: where they were taken.
        now: seconds since the epoch.
        of_rounds: what counts of a probe's seconds in several rounds.
    """
    seconds: dict[str, float] = {}
    excesses: list[float] = []
    for probe in probes:
        of_probe = [one_round[probe.name] for one_round in rounds]
        seconds[probe.name] = of_rounds(of_probe)
        excesses.append(statistics.median(of_probe) / min(of_probe) - 1)
    amounts = {probe.name: probe.amount for probe in probes}
    matrix: dict[str, Curve] = {}
    memory: Curve = ()
    links: dict[str, Link] = {}
    alone = 1.0
    for probe in probes:
        kind, *words = probe.name.split()
        rate = probe.amount / seconds[probe.name]
        if kind == "matrix":
            matrix[words[0]] = (*matrix.get(words[0], ()), (probe.amount / probe.bytes, rate))
        elif kind == "memory":
            memory = (*memory, (probe.amount, rate))
        elif kind == "link" and words[1] == "large":
            small = f"link {words[0]} small"
            links[words[0]] = _link(amounts[small], seconds[small], probe.amount, seconds[probe.name])
        elif kind == "alone":
            alone = max(1.0, seconds[" ".join(words)] / seconds[probe.name])
    overlap = 0.0
    wait_s = 0.0
    if links:
        computing = seconds["computing"]
        sending = seconds["link allreduce large"]
        saved = computing + sending - seconds["overlap"]
        overlap = min(1.0, max(0.0, saved / min(computing, sending)))
        turn = seconds["waiting"] / amounts["waiting"]
        wait_s = max(0.0, turn - computing - seconds["link allreduce small"])
    return Calibration(
        machine,
        now,
        matrix,
        memory,
        amounts["optimizer"] / seconds["optimizer"],
        seconds["overhead"] / amounts["overhead"],
        links,
        overlap,
        wait_s,
        alone,
        noise=statistics.median(excesses),
    )


def _link(small: float, small_s: float, large: float, large_s: float) -> Link:
    """Latency and rate of the line through a small and a large message."""
    if large_s <= small_s:  # noise: the large one took no longer
        return Link(0.0, large / large_s)
    bytes_per_s = (large - small) / (large_s - small_s)
    return Link(max(0.0, small_s - small / bytes_per_s), bytes_per_s)
