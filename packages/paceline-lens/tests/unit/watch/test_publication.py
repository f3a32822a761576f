"""What a page is sent: everything once, then what is newer than what it has seen."""

from __future__ import annotations

import json
import math

import pytest

from paceline_lens.watch.publication import Publication


@pytest.fixture
def run():
    return {"title": "digits", "names": ["loss", "lr"], "series": {"loss": [[1, 0.5]], "lr": [[1, 0.1]]}}


def made(snapshot) -> Publication:
    return Publication(snapshot, interval_s=0.0, largest_share=math.inf)


@pytest.fixture
def publication(run):
    return made(lambda names: run)


@pytest.fixture
def since(publication):
    with publication.page() as since:
        yield since


def content(update) -> dict[tuple[str, ...], object]:
    return {tuple(path): value for path, value in json.loads(update.data)}


def test_a_page_gets_everything_and_then_what_has_changed(since, run) -> None:
    first = since("")
    assert first.whole
    assert content(first)["series", "loss"] == [[1, 0.5]] and content(first)["title",] == "digits"
    assert since(first.id) is None
    run["series"]["loss"].append([2, 0.4])
    second = since(first.id)
    assert not second.whole and content(second) == {("series", "loss"): [[1, 0.5], [2, 0.4]]}
    assert since(second.id) is None


def test_a_page_that_was_away_gets_what_it_missed_once(since, run) -> None:
    first = since("")
    for value in range(5):
        run["title"] = f"digits {value}"
        since("")
    missed = since(first.id)
    assert not missed.whole and content(missed) == {("title",): "digits 4"}


@pytest.mark.parametrize("seen", ["", "nonsense", "-1", "0a1b2c3d-7", "x" * 10_000])
def test_a_page_of_another_server_starts_anew(since, seen) -> None:
    assert since(seen).whole


def test_a_part_that_goes_away_starts_all_pages_anew(since, run) -> None:
    first = since("")
    del run["title"]
    second = since(first.id)
    assert second.whole and ("title",) not in content(second)


def test_what_is_kept_does_not_grow_with_the_time(publication, since, run) -> None:
    for value in range(1000):
        run["title"] = str(value)
        since("")
    assert len(publication._parts) == 5  # title, names, two series, fault


def test_the_snapshot_is_made_once_for_all_pages() -> None:
    calls = []
    publication = Publication(lambda names: calls.append(1) or {}, interval_s=60)
    with publication.page() as since:
        for _ in range(10):
            since("")
    assert len(calls) == 1


def test_a_large_snapshot_is_made_less_often() -> None:
    calls = []
    publication = Publication(lambda names: calls.append(1) or {"x": [0] * 200_000}, interval_s=0.0, largest_share=1e-6)
    with publication.page() as since:
        for _ in range(10):
            since("")
    assert len(calls) == 1


def test_a_snapshot_that_fails_is_said_and_the_page_keeps_what_it_had(run) -> None:
    broken = False
    publication = made(lambda names: run | {"ranks": 1 / (0 if broken else 1)})
    with publication.page() as since:
        first = since("")
        broken = True
        second = since(first.id)
        assert content(second) == {("fault",): "ZeroDivisionError: division by zero"}
        assert content(since(""))["title",] == "digits"
        broken = False
        assert content(since(second.id)) == {("fault",): ""}


def test_a_page_gets_the_series_that_it_shows() -> None:
    names = [f"weight/{number}" for number in range(10_000)]
    asked = []

    def snapshot(chosen):
        asked.append(chosen)
        return {"names": names, "series": {name: [[1, 2.0]] for name in (names[:24] if chosen is None else chosen)}}

    publication = made(snapshot)
    with publication.page() as first, publication.page(["weight/9000"]) as second:
        first("")
        shown = content(first(""))
        assert [path[1] for path in shown if path[0] == "series"] == names[:24]
        shown = content(second(""))
        assert [path[1] for path in shown if path[0] == "series"] == ["weight/9000"]
        assert set(asked[-1]) == {*names[:24], "weight/9000"}
    with publication.page(["weight/1"]) as third:
        before = third("")
        assert asked[-1] == ["weight/1"]
        # The others' series went, which is no reason to start anew.
        assert third(before.id) is None
