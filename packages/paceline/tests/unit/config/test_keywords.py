"""Keyword arguments that a function does not take."""

from contextlib import contextmanager

import pytest

from paceline.base.errors import ArgumentError
from paceline.config.keywords import checked_keywords, refuse_unknown


@checked_keywords
class Machine:
    """Has a constructor, methods and a method that passes keywords on."""

    def __init__(self, speed=1, *, colour="red"):
        self.speed = speed

    def run(self, fast=False):
        if fast == "broken":
            raise TypeError("fast is broken")
        return self.speed

    @contextmanager
    def open(self, *, mode="r"):
        yield mode

    def anything(self, **options):
        return options


@pytest.mark.parametrize(
    ("call", "words", "fix"),
    [
        (lambda: Machine(sped=2), "Machine() has no argument 'sped'", "write speed="),
        (lambda: Machine(color="blue"), "it takes: speed, colour", "write colour="),
        (lambda: Machine().run(fats=True), "run() has no argument 'fats'", "write fast="),
        (lambda: Machine().open(mod="w"), "open() has no argument 'mod'", "write mode="),
        (lambda: Machine(wheels=4), "it takes: speed, colour", "leave wheels out"),
    ],
)
def test_an_unknown_one_names_the_closest(call, words, fix):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.code == "argument-unknown"
    assert isinstance(caught.value, TypeError)
    assert words in str(caught.value) and caught.value.problems[0].fix == fix
    assert caught.value.__suppress_context__  # Python's own error is not printed too


def test_other_calls_are_left_alone():
    assert Machine(2, colour="blue").run(fast=True) == 2
    assert Machine().anything(wheels=4) == {"wheels": 4}
    with Machine().open(mode="w") as mode:
        assert mode == "w"
    with pytest.raises(TypeError, match="fast is broken"):
        Machine().run(fast="broken")
    with pytest.raises(TypeError, match="positional argument"):
        Machine(1, 2)


def test_keywords_that_are_passed_on():
    refuse_unknown("backward", ["inputs"], ["gradient", "inputs"])
    with pytest.raises(ArgumentError, match="write gradient="):
        refuse_unknown("backward", ["gradent"], ["gradient", "inputs"])
