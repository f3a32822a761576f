"""`Experts`: a Mixture of Experts, as `ModelFacts` describes one. Who divides or counts experts finds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
        name: of the module that holds them.
        number: how many there are.
        parameters: the names of their weights in the module. Stacked weights have the experts as dim 0.
        modules: of a list, the names of the experts in `caller`; () for stacked weights.
        caller: of a list, the name of the module whose forward calls the experts.
        problem: what keeps their tokens from being sent to other ranks; "" if nothing does.
        capacity: the attribute by which the layer limits the tokens of an expert, with its value; "" without one.
        says_so: whether the structure of the module or a name says that these are experts. An option declares others.
    """

    name: str
    number: int
    parameters: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    caller: str = ""
    problem: str = ""
    capacity: str = ""
    says_so: bool = True
