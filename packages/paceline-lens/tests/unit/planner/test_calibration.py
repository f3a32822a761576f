"""A calibration's rates and its file: what is used, what is not, and the reason that is given."""

import json
from dataclasses import asdict, replace

import pytest

from paceline.base.errors import PlanError
from paceline_lens.forecast.calibration import Calibration, Link, Machine, find, rate_at, save
from paceline_lens.forecast.measure import WorkProbe, calibration_of
from paceline_lens.forecast.work import Computation

MACHINE = Machine("host1", "cpu", "2.13.0", 2, 1)
CALIBRATION = Calibration(
    MACHINE,
    measured=1000.0,
    matrix={"float32": ((100.0, 10.0), (10_000.0, 30.0))},
    memory=((10.0, 5.0), (1000.0, 2.0)),
    optimizer=4.0,
    overhead_s=0.5,
    links={"allreduce": Link(0.25, 100.0)},
    overlap=0.5,
    missing=("something: why",),
)


@pytest.mark.parametrize(
    ("size", "rate"),
    [(1, 10), (100, 10), (1000, 20), (10_000, 30), (1e9, 30)],
    ids=["below", "first", "between", "last", "above"],
)
def test_rates_between_measured_sizes(size, rate):
    assert rate_at(CALIBRATION.matrix["float32"], size) == pytest.approx(rate)


def test_seconds_are_amounts_by_rates():
    def seconds(flops, count, dtype="float32", calibration=CALIBRATION, **what):
        return calibration.compute_seconds(Computation("forward", dtype, flops, count, **what))

    assert seconds(100, 1) == 10
    # The same product with a hundred times the bytes, as one of few rows, is slower.
    assert seconds(60_000, 6) == 2000
    assert seconds(60_000, 600) == 6000
    assert seconds(60_000, 600, "float64") == 6000  # not measured: as float32
    assert seconds(0, 0) == 0
    assert seconds(0, 5000) == 2500
    assert seconds(60_000, 6, is_attention=True, calibration=replace(CALIBRATION, attention=0.5)) == 4000
    joined = replace(CALIBRATION, joined=0.5)
    assert seconds(0, 7000, calibration=joined, joined_bytes=3000) == 2500
    assert CALIBRATION.optimizer_seconds(8) == 2
    assert replace(CALIBRATION, optimizer=0.0).optimizer_seconds(5000) == 2500
    assert CALIBRATION.links["allreduce"].seconds(200, calls=3) == 2.75


def probe(name, amount, moved=0.0):
    return WorkProbe(name, amount, lambda: None, moved)


def test_the_medians_of_rounds_become_rates():
    probes = [
        probe("matrix float32 64", 1000.0, 50.0),
        probe("memory 10", 120.0),
        probe("optimizer", 80.0),
        probe("overhead", 20.0),
        probe("link allreduce small", 10.0),
        probe("link allreduce large", 1010.0),
        probe("computing", 1.0),
        probe("overlap", 1.0),
        probe("waiting", 4.0),
        probe("alone matrix float32 64", 1000.0),
    ]
    seconds = {
        "matrix float32 64": 2.0,
        "memory 10": 6.0,
        "optimizer": 8.0,
        "overhead": 0.02,
        "link allreduce small": 1.0,
        "link allreduce large": 6.0,
        "computing": 8.0,
        "overlap": 11.0,  # computing takes 8, the message 6: 3 of 6 are hidden
        "waiting": 38.0,  # 4 times 8 and 1, and half a second more
        "alone matrix float32 64": 1.6,
    }
    fast = {name: value / 2 for name, value in seconds.items()}
    rounds = [dict.fromkeys(seconds, 99.0), seconds, fast]
    calibration = calibration_of(probes, rounds, MACHINE, 7.0)
    assert calibration == Calibration(
        MACHINE,
        7.0,
        {"float32": ((20.0, 500.0),)},
        ((120.0, 20.0),),
        10.0,
        0.001,
        {"allreduce": Link(0.95, 200.0)},
        0.5,
        0.5,
        1.25,
        noise=1.0,
    )
    assert "the machine was busy: rounds differ by 100%" in calibration.text()


def test_one_rank_measures_no_links():
    probes = [probe("matrix float32 512", 1.0, 1.0), probe("memory 10", 1.0), probe("optimizer", 1.0)]
    probes.append(probe("overhead", 1.0))
    rounds = [dict.fromkeys([one.name for one in probes], 1.0)]
    calibration = calibration_of(probes, rounds, MACHINE, 0.0)
    assert calibration.links == {} and (calibration.overlap, calibration.wait_s) == (0.0, 0.0)


def test_what_was_saved_is_found_with_its_file_and_date(tmp_path):
    path = save(CALIBRATION, tmp_path)
    lookup = find(MACHINE, tmp_path, now=2000.0)
    assert lookup.calibration == CALIBRATION
    assert lookup.reason == f"{path} of {CALIBRATION.date}"
    assert "allreduce: 250000 us" in CALIBRATION.text() and "not measured: something: why" in CALIBRATION.text()


def test_stale_and_foreign_files_are_not_used_and_the_reason_names_them(tmp_path):
    path = save(CALIBRATION, tmp_path)
    stale = find(MACHINE, tmp_path, now=1000.0 + 40 * 86400)
    assert stale.calibration is None
    assert stale.reason.startswith(f"{path} of {CALIBRATION.date} is not used: it is 40 days old")
    newer = find(replace(MACHINE, torch="2.15.0"), tmp_path, now=2000.0)
    assert newer.calibration is None
    assert f"{path} of {CALIBRATION.date} is not used: it was measured with torch 2.13.0, here 2.15.0" in newer.reason
    wider = find(replace(MACHINE, procs=4), tmp_path, now=2000.0)
    assert wider.calibration is None
    assert "there is host1-cpu-2x1.json for other ranks or threads" in wider.reason
    assert wider.reason.endswith("`paceline plan --measure --procs 4` measures")
    nowhere = find(MACHINE, tmp_path / "missing")
    assert nowhere.calibration is None and "there is no calibration" in nowhere.reason


@pytest.mark.parametrize("damage", ["{", "[]", '{"version": 1}', '{"version": 2}', "no rate"])
def test_a_damaged_file_is_named_and_not_used(tmp_path, damage):
    path = save(CALIBRATION, tmp_path)
    if damage == "no rate":
        damage = json.dumps({**asdict(CALIBRATION), "memory": [[10, 0]]})
    path.write_text(damage)
    lookup = find(MACHINE, tmp_path, now=2000.0)
    assert lookup.calibration is None and f"{path} is not used: it cannot be read" in lookup.reason


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="calibration-write") as caught:
        save(CALIBRATION, tmp_path / "file" / "below")
    assert "XDG_STATE_HOME" in str(caught.value)
