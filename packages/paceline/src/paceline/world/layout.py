"""Axis sizes <-> coordinates of a rank: pure arithmetic, so that topology is tested with no processes.

    AXES      one entry for each axis: its setting and flag, its place in the mesh, what a search may do with it
    Layout    how many ranks stand along each of them

An axis is added by one entry here and a strategy that serves it (`paceline/parallel/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal


@dataclass(frozen=True)
class Axis:
    """One way in which ranks divide the work.

    Attributes:
        name: of the axis and of its setting.
        doc: help of the setting, a sentence.
        default: the setting's value where nobody says otherwise: a number, or "auto" for what the other axes leave.
        divides: what ranks along it divide, such as "the layers"; "" where that depends on more than the axis.
        reads_samples: whether ranks along it read different samples.
        averages_gradients: whether they hold the same parameters, and so average their gradients; of parameters that the axis
            divides, each has its own.
        divides_parameters: whether each rank along it has parameters, or parts of them, that the others have not.
        searched: the most ranks along it that a search for a plan tries: all, or those of one node; "" where a search
            leaves its size alone.
    """

    name: str
    doc: str
    default: int | Literal["auto"] = 1
    divides: str = ""
    reads_samples: bool = False
    averages_gradients: bool = False
    divides_parameters: bool = False
    searched: Literal["", "all", "node"] = ""


# In the order of the mesh, the outermost axis first. Ranks are numbered row by row: neighbours along the last axis, which
# talk most, are neighbours in rank, and so on one host. `torch.distributed.DeviceMesh` numbers the same way.
AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis(
            "pp",
            "Number of ranks that divide the layers (pipeline parallel).",
            divides="the layers",
            divides_parameters=True,
            searched="all",
        ),
        Axis(
            "replicate",
            "Number of copies of the model, which read different samples; auto: the ranks that the other axes leave.",
            default="auto",
            reads_samples=True,
            averages_gradients=True,
        ),
        Axis(
            "shard",
            "Number of ranks that divide what `zero` names, and read different samples; auto: 1, or with zero the ranks that "
            "the other axes leave.",
            default="auto",
            reads_samples=True,
            averages_gradients=True,
        ),
        Axis(
            "cp",
            "Number of ranks that divide each sequence (context parallel).",
            divides="each sequence",
            averages_gradients=True,
        ),
        Axis(
            "ep",
            "Number of ranks that divide the experts of a Mixture of Experts, and read different samples (expert parallel).",
            divides="the experts",
            reads_samples=True,
            averages_gradients=True,
            divides_parameters=True,
        ),
        Axis(
            "tp",
            "Number of ranks that divide the matrices of each layer (tensor parallel).",
            divides="the matrices of each layer",
            divides_parameters=True,
            searched="node",
        ),
    )
}
DATA_AXES: tuple[str, ...] = tuple(axis.name for axis in AXES.values() if axis.reads_samples)
GRADIENT_AXES: tuple[str, ...] = tuple(axis.name for axis in AXES.values() if axis.averages_gradients)


def model_axes() -> list[str]:
    """Axes along which ranks work on the same samples, from those that stand closest together on."""
    return [axis.name for axis in reversed(AXES.values()) if not axis.reads_samples]


def given_axes() -> list[str]:
    """Axes whose size does not follow from that of the others, from those that stand closest together on."""
    return [axis.name for axis in reversed(AXES.values()) if axis.default != "auto"]


def listed_axes() -> list[Axis]:
    """All axes in the order in which people read of them: those that divide the samples first."""
    return [AXES[name] for name in (*DATA_AXES, *model_axes())]


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """How many ranks stand along each axis: `layout.tp`. The product is the number of processes.

    Args:
        sizes: by the axis's name; 1 for one that is not named.
    """

    _sizes_above_one: tuple[tuple[str, int], ...]

    def __init__(self, **sizes: int) -> None:
        for name in sizes:
            if name not in AXES:
                raise TypeError(f"there is no axis {name!r}; there are {', '.join(AXES)}")
        above_one = tuple((axis, sizes[axis]) for axis in AXES if sizes.get(axis, 1) != 1)
        object.__setattr__(self, "_sizes_above_one", above_one)

    def __getattr__(self, axis: str) -> int:
        if axis not in AXES:
            raise AttributeError(f"there is no axis {axis!r}; there are {', '.join(AXES)}")
        return dict(self._sizes_above_one).get(axis, 1)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self._sizes_above_one)
        return f"Layout({sizes})"

    def sizes(self) -> Mapping[str, int]:
        """Ranks along each axis, by name."""
        return dict.fromkeys(AXES, 1) | dict(self._sizes_above_one)

    def size(self, *axes: str) -> int:
        """Number of ranks along `axes`, multiplied; of the whole layout where none is named."""
        return prod(getattr(self, axis) for axis in (axes or AXES))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis."""
        coordinate = dict.fromkeys(AXES, 0)
        # The last axis first: ranks along it are consecutive.
        for axis in reversed(AXES):
            rank, coordinate[axis] = divmod(rank, self.size(axis))
        return coordinate

    @property
    def width(self) -> int:
        """How many ranks read different samples: `replicate` x `shard` x `ep`."""
        return self.size(*DATA_AXES)

    @property
    def parameter_parts(self) -> int:
        """Into how many parts ranks divide parameters for another reason than `shard`: `tp` x `pp`, and of experts `ep`."""
        return prod(self.size(axis.name) for axis in AXES.values() if axis.divides_parameters)

    def data_index(self, rank: int) -> int:
        """Which share of each global batch `rank` reads; peers along tp, cp and pp share an index."""
        coordinate = self.coordinate(rank)
        index = 0
        for axis in DATA_AXES:
            index = index * self.size(axis) + coordinate[axis]
        return index

    def __str__(self) -> str:
        used = [f"{axis} {size}" for axis, size in self._sizes_above_one]
        return " x ".join(used) or "one process"
