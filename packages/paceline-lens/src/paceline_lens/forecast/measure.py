"""`Probes` measures a `Calibration` of this machine. `paceline plan --measure` starts ranks that run it (`calibrate.py`).

A probe is a short piece of work. Each probe runs in several rounds, and the median of its times counts. All ranks run the
same probe at the same time, since ranks of a host share its memory and, if there are fewer cores than threads, its cores
too. The slowest rank decides, since a step waits for it.

    matrix     the three products of a linear layer, for 4 to 1024 rows, by dtype
    memory     `a + b`, which reads and writes 64 kB to 64 MB, with tensors that are no longer in a cache
    optimizer  a step of fused AdamW over 4 million parameters
    overhead   forward and backward passes of layers of 8 values, for the cost of each operation
    link       small and large messages: the collectives of torch, and the sends between pairs of ranks
    computing  products of matrices alone, to compare the next two with
    overlap    the same products while an all-reduce is under way
    waiting    the same products and small all-reduces in turns
    alone      the linear layer with 64 rows on the first rank while the others wait
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

from paceline.torch_internals import dispatch
from paceline.world.transport import Transport, all_gather_single, reduce_scatter_single, transport_of
from paceline_lens.forecast.calibration import Calibration, Curve, Link, Machine

_MATRIX_ROWS = (4, 16, 64, 256, 1024)
_WIDTH = 512  # inputs of the linear layer; it has four times as many outputs
# The probe takes the weights of several layers in turn: a real step finds none of its weights in a cache either.
_LAYERS = 8
_DTYPES = (torch.float32, torch.bfloat16)
_ELEMENTS = (5_400, 87_000, 1_400_000, 5_600_000)  # elements of each of the three tensors of `a + b`
_SMALL_ELEMENTS = 256  # elements of a small message
_LARGE_ELEMENTS = 4 << 20  # elements of a large message
_OPTIMIZED = 4 << 20
_UNCACHED_ELEMENTS = 8 << 20  # elements of all operands of a memory probe together: more than a cache has room for
_TURNS = 4  # turns of computing and waiting in one run of the probe
_PROBE_S = 0.01  # a probe runs at least this long, so that the resolution of the clock does not matter

Rounds = Sequence[dict[str, float]]  # for each round, the seconds of each probe by its name


@dataclass(frozen=True)
class WorkProbe:
    """A piece of work whose time is measured.

    Attributes:
        name: its kind and its size, such as "matrix float32 512".
        amount: what it computes (FLOP) or moves (bytes); for other kinds, how many operations or turns it has.
        work: a function that does the work once.
        bytes: bytes that a probe of arithmetic reads and writes.
        first_alone: whether the first rank runs it alone, while the others wait.
    """

    name: str
    amount: float
    work: Callable[[], object]
    bytes: float = 0.0
    first_alone: bool = False


class Probes:
    """Holds the probes of this rank, ready to run.

    Args:
        device: the device that computes.
        group: the ranks that measure; None if there is only this one.

    Ranks: all ranks of the group construct it, and call `round` equally often.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device = device
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.missing: list[str] = []
        self._probes = [*self._matrices(), *self._memory(), self._optimizer(), self._overhead()]
        if group is None:
            self.missing.append("links and overlap: there is one rank; `--procs 2` starts two")
        else:
            self._probes += self._links(group)
            self._probes += self._beside_computing(group)
            # Ranks compute alone while a pipeline fills and drains, and its micro-batches have few rows: a medium size.
            rows = _MATRIX_ROWS[len(_MATRIX_ROWS) // 2]
            matrix = next(probe for probe in self._probes if probe.name == f"matrix float32 {rows}")
            self._probes.append(replace(matrix, name=f"alone {matrix.name}", first_alone=True))
        self._times = self._repetitions()

    def _repetitions(self) -> dict[str, int]:
        """Returns how often each probe runs in a round. Ranks: all; each gets the same numbers."""
        times: dict[str, int] = {}
        for probe in self._probes:
            self._run(probe, 1)  # the first run allocates memory and connects ranks
            seconds = self._slowest(self._run(probe, 1))
            times[probe.name] = max(1, min(1000, round(_PROBE_S / max(seconds, 1e-7))))
        return times

    def round(self) -> dict[str, float]:
        """Runs all probes and returns the seconds of each on the slowest rank. Ranks: all."""
        seconds: dict[str, float] = {}
        for probe in self._probes:
            if self._group is not None:
                dist.barrier(self._group)
            seconds[probe.name] = self._slowest(self._run(probe, self._times[probe.name]))
        return seconds

    def _run(self, probe: WorkProbe, times: int) -> float:
        """Runs a probe several times and returns the mean seconds; 0 on a rank that waits for the first rank."""
        if probe.first_alone and dist.get_rank(self._group) > 0:
            return 0.0
        _wait_for(self._device)
        began = time.perf_counter()
        for _ in range(times):
            probe.work()
        _wait_for(self._device)
        return (time.perf_counter() - began) / times

    def _slowest(self, seconds: float) -> float:
        if self._group is None:
            return seconds
        slowest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, self._group)
        return float(slowest)

    def calibration(self, rounds: Rounds, machine: Machine, now: float) -> Calibration:
        """Returns the calibration that follows from the rounds; the arguments are those of `calibration_of`."""
        calibration = calibration_of(self._probes, rounds, machine, now)
        return replace(calibration, missing=tuple(self.missing))

    # -- what is measured --------------------------------------------------------------------------------------

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(*shape, device=self._device).to(dtype)

    def _matrices(self) -> list[WorkProbe]:
        probes: list[WorkProbe] = []
        for dtype in _DTYPES:
            name = str(dtype).removeprefix("torch.")
            weights = [self._new(4 * _WIDTH, _WIDTH, dtype=dtype) for _ in range(_LAYERS)]
            for rows in _MATRIX_ROWS:
                inputs = self._new(rows, _WIDTH, dtype=dtype)
                gradients = self._new(rows, 4 * _WIDTH, dtype=dtype)
                flops = 3 * 2.0 * rows * 4 * _WIDTH**2
                moved = 3 * dtype.itemsize * (inputs.numel() + weights[0].numel() + gradients.numel())
                work = partial(_linear_layer, inputs, gradients, cycle(weights))
                probes.append(WorkProbe(f"matrix {name} {rows}", flops, work, moved))
        return probes

    def _memory(self) -> list[WorkProbe]:
        probes: list[WorkProbe] = []
        for elements in _ELEMENTS:
            count = max(2, _UNCACHED_ELEMENTS // elements)
            operands = cycle(self._new(count, elements).unbind())
            probes.append(WorkProbe(f"memory {elements}", 12.0 * elements, partial(_sum_of_next, operands)))
        return probes

    def _optimizer(self) -> WorkProbe:
        parameter = torch.nn.Parameter(self._new(_OPTIMIZED))
        parameter.grad = self._new(_OPTIMIZED)
        step = torch.optim.AdamW([parameter], fused=True).step
        # The kernel is declared to read and write parameters, gradients and two states: 4 tensors, 4 bytes an element, in
        # both directions. `OperationTrace` counts it in the same way, so that both agree.
        return WorkProbe("optimizer", 8.0 * 4 * _OPTIMIZED, step)

    def _overhead(self) -> WorkProbe:
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
        return WorkProbe("overhead", operations.count, passes)

    def _links(self, group: dist.ProcessGroup) -> list[WorkProbe]:
        probes: list[WorkProbe] = []
        transport = transport_of(group, self._device)
        for size, elements in (("small", _SMALL_ELEMENTS), ("large", _LARGE_ELEMENTS)):
            whole = self._new(elements // self.size * self.size)
            part = self._new(elements // self.size)
            received = torch.empty_like(whole)
            num_bytes = 4.0 * whole.numel()
            # What a rank sends in a ring, which leaves out its own part; an all-reduce goes around twice.
            ring_bytes = num_bytes * (self.size - 1) / self.size
            probes += [
                WorkProbe(f"link allreduce {size}", 2 * ring_bytes, partial(dist.all_reduce, whole, group=group)),
                WorkProbe(f"link allgather {size}", ring_bytes, partial(all_gather_single, whole, part, group=group)),
                WorkProbe(
                    f"link reducescatter {size}", ring_bytes, partial(reduce_scatter_single, part, whole, group=group)
                ),
                WorkProbe(
                    f"link broadcast {size}", num_bytes, partial(dist.broadcast, whole, group=group, group_src=0)
                ),
                WorkProbe(
                    f"link alltoall {size}", ring_bytes, partial(dist.all_to_all_single, received, whole, group=group)
                ),
                WorkProbe(f"link send {size}", ring_bytes, partial(_exchange, transport, whole, part)),
            ]
        return probes

    def _beside_computing(self, group: dist.ProcessGroup) -> list[WorkProbe]:
        """Returns probes of computing alone, during a message, and in turns with messages for which it waits."""
        left = self._new(512, 512)
        right = self._new(512, 512)
        large = self._new(_LARGE_ELEMENTS)
        small = self._new(_SMALL_ELEMENTS)

        def computing() -> None:
            for _ in range(4):
                torch.mm(left, right)

        def both() -> None:
            handle = dist.all_reduce(large, group=group, async_op=True)
            computing()
            assert handle is not None
            handle.wait()

        def in_turns() -> None:
            for _ in range(_TURNS):
                computing()
                dist.all_reduce(small, group=group)

        return [
            WorkProbe("computing", 1.0, computing),
            WorkProbe("overlap", 1.0, both),
            WorkProbe("waiting", _TURNS, in_turns),
        ]


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
    """Computes the output of a linear layer, the gradient of its inputs and that of its weight: one product each."""
    weight = next(weights)
    torch.mm(inputs, weight.t())
    torch.mm(gradients, weight)
    torch.mm(gradients.t(), inputs)


def _sum_of_next(operands: Iterator[Tensor]) -> Tensor:
    return next(operands) + next(operands)


def _exchange(transport: Transport, whole: Tensor, part: Tensor) -> None:
    """Sends between every pair of ranks, in the way of ZeRO and tensor parallel."""
    transport.all_gather(whole, part).wait()


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def calibration_of(probes: Sequence[WorkProbe], rounds: Rounds, machine: Machine, now: float) -> Calibration:
    """Computes rates from the seconds of probes. Pure.

    Args:
        probes: the probes that were run.
        rounds: the seconds of each probe by its name, for several rounds.
        machine: the machine that was measured.
        now: seconds since the epoch.
    """
    seconds: dict[str, float] = {}
    excesses: list[float] = []
    for probe in probes:
        seconds_by_round = [round_seconds[probe.name] for round_seconds in rounds]
        seconds[probe.name] = statistics.median(seconds_by_round)
        excesses.append(seconds[probe.name] / min(seconds_by_round) - 1)
    amounts = {probe.name: probe.amount for probe in probes}
    matrix: dict[str, Curve] = {}
    memory: Curve = ()
    links: dict[str, Link] = {}
    alone = 1.0
    for probe in probes:
        kind, *words = probe.name.split()
        rate = probe.amount / seconds[probe.name]
        if kind == "matrix":
            dtype = words[0]
            matrix[dtype] = (*matrix.get(dtype, ()), (probe.amount / probe.bytes, rate))
        elif kind == "memory":
            memory = (*memory, (probe.amount, rate))
        elif kind == "link" and words[1] == "large":
            operation = words[0]
            small = f"link {operation} small"
            links[operation] = _link(amounts[small], seconds[small], probe.amount, seconds[probe.name])
        elif kind == "alone":
            matrix_name = " ".join(words)
            alone = max(1.0, seconds[matrix_name] / seconds[probe.name])
    overlap = 0.0
    wait_s = 0.0
    if links:
        computing_s = seconds["computing"]
        sending_s = seconds["link allreduce large"]
        saved_s = computing_s + sending_s - seconds["overlap"]
        overlap = min(1.0, max(0.0, saved_s / min(computing_s, sending_s)))
        turn_s = seconds["waiting"] / amounts["waiting"]
        wait_s = max(0.0, turn_s - computing_s - seconds["link allreduce small"])
    return Calibration(
        machine=machine,
        measured=now,
        matrix=matrix,
        memory=memory,
        optimizer=amounts["optimizer"] / seconds["optimizer"],
        overhead_s=seconds["overhead"] / amounts["overhead"],
        links=links,
        overlap=overlap,
        wait_s=wait_s,
        alone=alone,
        noise=statistics.median(excesses),
    )


def _link(small: float, small_s: float, large: float, large_s: float) -> Link:
    """Returns the latency and the rate of the straight line through the times of a small and a large message."""
    if large_s <= small_s:  # the noise is larger than the difference: there is no line with a rate above zero
        return Link(0.0, large / large_s)
    bytes_per_s = (large - small) / (large_s - small_s)
    return Link(max(0.0, small_s - small / bytes_per_s), bytes_per_s)
