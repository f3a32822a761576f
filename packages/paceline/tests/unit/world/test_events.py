"""Events: who is called, in which order, and until when."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest

from paceline.world.events import Event, Events, Span


def test_subscribers_are_called_in_their_order_until_they_leave() -> None:
    seen = []
    happened: Event[[int]] = Event()
    assert not happened
    leave = happened.subscribe(lambda number: seen.append(("first", number)))
    happened.subscribe(lambda number: seen.append(("second", number)))
    happened(1)
    leave()
    leave()  # a second call does nothing
    happened(2)
    assert seen == [("first", 1), ("second", 1), ("second", 2)] and happened


def test_one_that_leaves_while_it_is_called_does_not_disturb_the_others() -> None:
    seen = []
    happened: Event[[]] = Event()

    def once() -> None:
        leave()
        seen.append("once")

    leave = happened.subscribe(once)
    happened.subscribe(lambda: seen.append("always"))
    happened()
    happened()
    assert seen == ["once", "always", "always"]


def test_an_error_of_a_subscriber_is_the_callers() -> None:
    happened: Event[[]] = Event()
    happened.subscribe(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        happened()


def test_a_span_enters_the_context_of_its_name() -> None:
    seen = []
    span = Span(["step", "clip"])
    with span["step"]:
        pass
    assert not span.is_followed

    @contextmanager
    def context(name: str):
        seen.append(name)
        yield
        seen.append("over")

    span.subscribe({"step": context("step")})
    with span["step"], span["clip"]:
        seen.append("inside")
    assert seen == ["step", "inside", "over"]


def test_a_copy_tells_nobody() -> None:
    events = Events()
    events.several_batches.subscribe(lambda: 1 / 0)
    assert events.several_batches and not copy.deepcopy(events).several_batches
