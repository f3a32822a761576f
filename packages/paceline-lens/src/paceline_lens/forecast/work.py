"""`Work`: what one rank does in a step, operation by operation: arithmetic, bytes moved, and messages. Equal ones are counted.

It holds no times: `step_time` makes them of it and a `Calibration`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Computation:
    """One operation of torch.

    Attributes:
        phase: "forward", "backward" or "optimizer"; what runs between two steps counts as forward.
        dtype: of its first tensor, such as "float32".
        flops: floating-point operations of matrix products; 0 for all others.
        bytes: read and written.
        is_attention: whether it is an attention kernel, whose products are smaller than those of layers.
        joined_bytes: read and written where a compiler joins operations, see `joined`.
    """

    phase: str
    dtype: str
    flops: int
    bytes: int
    is_attention: bool = False
    joined_bytes: int = 0


@dataclass(frozen=True)
class Message:
    """One call of a collective operation, or one send.

    Attributes:
        phase: as of a computation.
        operation: "allreduce", "reducescatter", "allgather", "alltoall", "broadcast", "reduce" or "send".
        ranks: of its group.
        across: whether the group spans several nodes.
        bytes: that this rank sends.
        torch_name: torch's own name of the call, such as "reduce_scatter_base"; the time does not depend on it.
    """

    phase: str
    operation: str
    ranks: int
    across: bool
    bytes: int
    torch_name: str = ""


@dataclass
class Work:
    """How often each computation and each message came.

    Attributes:
        computations, messages: their counts.
        lookups: how many rows were read of embeddings in forward passes, by the number of their rows.
    """

    computations: Counter[Computation] = field(default_factory=Counter)
    messages: Counter[Message] = field(default_factory=Counter)
    lookups: Counter[int] = field(default_factory=Counter)

    @property
    def flops(self) -> float:
        """Floating-point operations of all computations."""
        return float(sum(computation.flops * count for computation, count in self.computations.items()))

    @property
    def sent(self) -> Mapping[tuple[str, int, bool], int]:
        """The bytes that were sent, by (torch's name, ranks of the group, whether the group spans several nodes)."""
        sent: Counter[tuple[str, int, bool]] = Counter()
        for message, count in self.messages.items():
            sent[message.torch_name, message.ranks, message.across] += count * message.bytes
        return sent

    @property
    def tokens(self) -> int:
        """How many tokens the forward passes read: those of the largest embedding. 0 if there is none."""
        return self.lookups[max(self.lookups)] if self.lookups else 0
