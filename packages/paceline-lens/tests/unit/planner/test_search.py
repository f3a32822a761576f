"""What a tuning tries, in which order, when it stops and which one it takes: tables of cases, no process."""

from dataclasses import replace

import pytest

from paceline.base.errors import ConfigError
from paceline_lens.tune.script_config import script_configs
from paceline_lens.tune.search import (
    Candidate,
    Forecast,
    Measured,
    SearchProgress,
    Space,
    Tuning,
    batches,
    score,
    sort_out,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("tuning", "width", "micro", "accumulate", "total", "expected"),
    [
        (Tuning(), 2, 8, 1, 16, [(1, 8), (2, 4), (4, 2), (8, 1)]),
        (Tuning(min_micro=2, max_micro=4), 2, 8, 1, 16, [(2, 4), (4, 2)]),
        (Tuning(), 2, 6, 2, 24, [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]),
        (Tuning(max_micro=8), 2, 4, 3, None, [(1, 3), (2, 3), (4, 3), (8, 3)]),
        (Tuning(max_micro=8), 1, 6, 1, None, [(1, 1), (2, 1), (4, 1), (6, 1), (8, 1)]),
        (Tuning(max_micro=64, min_batch=16, max_batch=32), 2, 8, 1, None, [(8, 1), (16, 1)]),
        (Tuning(min_micro=64), 2, 8, 1, 16, []),
        (Tuning(max_batch=0), 2, 8, 1, None, []),
    ],
)
def test_batches_keep_what_is_fixed(tuning, width, micro, accumulate, total, expected):
    found = batches(tuning, width, micro, accumulate, total)
    assert found == expected
    if total is not None:
        assert {size * steps * width for size, steps in found} <= {total}


def test_a_space_lists_the_simplest_first():
    space = Space((0, 3), ("no", "blocks"), ((2, 4), (8, 1)), {3: ((("shard.reshard", False),),)})
    found = space.candidates()
    assert [each.name for each in found[:4]] == [
        "z0_gas1_tmbspg8",
        "z0_gas4_tmbspg2",
        "z3_gas1_tmbspg8",
        "z3_gas4_tmbspg2",
    ]
    assert found[4].name == "z3_gas1_tmbspg8_reshard-False"
    assert len({each.name for each in found}) == len(found) == 2 * 2 * 3
    assert found[0].batch(2) == found[1].batch(2) == 16


def test_a_candidate_in_our_settings():
    plain = {"recompute": "no", "accumulate": 1, "offload": "no"}
    assert Candidate(0, 8, 1).settings(4) == {"replicate": 4, "shard": 1, "zero": 0, **plain}
    assert Candidate(2, 8, 1).settings(4) == {"replicate": 1, "shard": 4, "zero": 2, **plain}
    assert Candidate(2, 8, 1).settings(1) == {"replicate": 1, "shard": 1, "zero": 0, **plain}
    assert Candidate(2, 8, 1).settings(4, divided=False) == plain


def test_what_does_not_fit_is_not_queued_and_the_rest_goes_by_predicted_time():
    candidates = [Candidate(zero, micro, 1) for zero in (0, 3) for micro in (8, 4, 2, 1)]
    forecasts = {
        each: Forecast((each.micro * (2 - each.zero // 3)) * GIB, 1.0 + each.zero / 10, 1.0) for each in candidates
    }
    forecasts[Candidate(3, 8, 1)] = Forecast(problem="no such plan")
    queue, left = sort_out(candidates, forecasts, 8 * GIB, Tuning(micro_sizes=2, metric="latency"))
    assert queue == [Candidate(0, 4, 1), Candidate(0, 2, 1), Candidate(3, 4, 1), Candidate(3, 2, 1)]
    assert left == [Candidate(0, 8, 1), Candidate(3, 8, 1)]  # of each plan the smallest that does not fit
    queue, _ = sort_out(candidates, forecasts, 8 * GIB, Tuning(micro_sizes=2))  # samples a second: more at once
    assert queue == [Candidate(0, 4, 1), Candidate(3, 4, 1), Candidate(0, 2, 1), Candidate(3, 2, 1)]
    by_lot = sort_out(candidates, forecasts, 8 * GIB, Tuning(micro_sizes=2, order="random"))[0]
    assert sorted(by_lot, key=repr) == sorted(queue, key=repr)
    assert by_lot == sort_out(candidates, forecasts, 8 * GIB, Tuning(micro_sizes=2, order="random"))[0]
    in_turn = sort_out(candidates, forecasts, 8 * GIB, Tuning(micro_sizes=2, order="gridsearch"))[0]
    assert in_turn == [Candidate(0, 4, 1), Candidate(0, 2, 1), Candidate(3, 4, 1), Candidate(3, 2, 1)]


def measured(seconds, noise=0.0, batch=16):
    return Measured("measured", seconds, noise, batch)


def test_metrics():
    assert score("throughput", 2.0, 16, 0) == 8.0
    assert score("latency", 2.0, 16, 0) == -2.0
    assert score("flops", 2.0, 16, 6.0) == 3.0
    assert score("throughput", 2.0, None, 0) == 0.5  # nobody knows the samples: steps a second


def test_it_stops_after_trials_without_an_improvement():
    progress = SearchProgress(Tuning(early_stop=2), {})
    for number, seconds in enumerate((3.0, 2.0, 2.5)):
        progress.add(Candidate(0, number + 1, 1), measured(seconds))
        assert not progress.done
    progress.add(Candidate(1, 1, 1), Measured("does not fit", why="out of memory"))
    assert progress.done == "the last 2 trials were no improvement"
    assert progress.best() == (Candidate(0, 2, 1), [])


def test_it_does_not_stop_before_anything_was_measured_and_keeps_to_the_number_of_trials():
    progress = SearchProgress(Tuning(early_stop=1, trials=3), {})
    for number in range(3):
        assert not progress.done
        progress.add(Candidate(0, number + 1, 1), Measured("failed", why="no"))
    assert progress.done == "3 trials were run, as many as were allowed"
    assert progress.best() == (None, [])


def test_within_noise_the_simpler_one_is_taken():
    progress = SearchProgress(Tuning(), {})
    progress.add(Candidate(0, 8, 1), measured(1.02, 0.03))
    progress.add(Candidate(2, 8, 1), measured(1.00, 0.03))
    progress.add(Candidate(0, 4, 2), measured(1.00, 0.03))
    progress.add(Candidate(3, 8, 1), measured(1.20, 0.03))
    assert progress.leader in (Candidate(2, 8, 1), Candidate(0, 4, 2))
    assert progress.best() == (Candidate(0, 8, 1), [Candidate(0, 4, 2), Candidate(2, 8, 1)])
    assert progress.since == 3  # a tie is no improvement


def test_what_is_close_runs_again_and_the_faster_trial_counts():
    progress = SearchProgress(Tuning(metric="latency"), {})
    progress.add(Candidate(0, 8, 1), measured(1.3, 0.5))
    assert progress.contenders() == []  # alone
    progress.add(Candidate(2, 8, 1), measured(1.0, 0.01))
    progress.add(Candidate(3, 8, 1), measured(2.0, 0.01))
    assert progress.contenders() == [Candidate(2, 8, 1), Candidate(0, 8, 1)]
    first = replace(measured(1.0, 0.01), trials=2)
    assert progress.again(Candidate(2, 8, 1), measured(1.1, 0.01)) == first
    assert progress.again(Candidate(2, 8, 1), Measured("failed")) == first
    assert progress.again(Candidate(0, 8, 1), measured(0.8, 0.01)) == replace(measured(0.8, 0.01), trials=2)
    assert progress.best() == (Candidate(0, 8, 1), [])


def test_values_that_cannot_be_searched_by_are_told_at_once():
    tuning = Tuning(metric="speed", first_step=1, last_step=0, trials=0, arguments={"stage": "--stage"})
    with pytest.raises(ConfigError) as caught:
        tuning.check({"metric": "--metric"})
    assert {each.code for each in caught.value.problems} == {"tune-value"}
    assert len(caught.value.problems) == 5
    assert "--metric" in str(caught.value)


def test_a_largest_batch_of_zero_is_refused():
    with pytest.raises(ConfigError, match="max_batch = 0"):
        Tuning(max_batch=0).check({})


# -- DeepSpeed's block -----------------------------------------------------------------------------------------


@pytest.mark.needs("deepspeed")
def test_the_autotuning_block():
    block = {
        "enabled": True, "results_dir": None, "exps_dir": None, "overwrite": False, "metric": "latency",
        "start_profile_step": 4, "end_profile_step": 6, "fast": False, "num_tuning_micro_batch_sizes": 2,
        "min_train_micro_batch_size_per_gpu": 2, "max_train_micro_batch_size_per_gpu": 64, "max_train_batch_size": 512,
        "tuner_type": "random", "tuner_early_stopping": 3, "tuner_num_trials": 9,
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"},
    }  # fmt: skip
    config = script_configs().read(
        {"train_batch_size": 16, "zero_optimization": {"stage": [1, 3]}, "autotuning": block}
    )
    tuning = config.tuning({"trials": 4})
    assert tuning == Tuning(
        metric="latency", first_step=4, last_step=6, fast=False, micro_sizes=2, min_micro=2, max_micro=64, max_batch=512,
        order="random", early_stop=3, trials=4, arguments={"micro": "--per_device_train_batch_size"},
    )  # fmt: skip
    assert config.stages() == (1, 3)
    assert config.fixed_batch() == 16


@pytest.mark.needs("deepspeed")
@pytest.mark.parametrize(
    ("stage", "expected"), [("all", (0, 1, 2, 3)), (2, (2,)), ([0, 2], (0, 2)), (None, (0, 1, 2, 3))]
)
def test_stages(stage, expected):
    zero = {} if stage is None else {"zero_optimization": {"stage": stage}}
    content = {"train_batch_size": 16, **zero}
    assert script_configs().read(content).stages() == expected
    assert script_configs().plain(content).get("zero_optimization", {}).get("stage", 0) == expected[0]


@pytest.mark.needs("deepspeed")
def test_a_candidate_in_a_config():
    content = {
        "train_batch_size": 16,
        "zero_optimization": {"stage": "all", "overlap_comm": True},
        "csv_monitor": {"enabled": True, "output_path": "logs"},
        "wall_clock_breakdown": True,
        "autotuning": {"enabled": True},
    }
    candidate = Candidate(2, 4, 2, options=(("reduce_bucket_size", 1000),))
    found = script_configs().with_candidate(content, candidate, {})
    assert found == {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1000},
        "csv_monitor": {"enabled": True, "output_path": "logs"},
        "wall_clock_breakdown": True,
    }
    quiet = script_configs().plain(found)
    assert quiet["csv_monitor"]["enabled"] is False and "wall_clock_breakdown" not in quiet
    assert content["autotuning"] == {"enabled": True}  # the user's own is left alone
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    found = script_configs().with_candidate(auto, Candidate(0, 4, 2), {"micro": "--per_device_train_batch_size"})
    assert found["train_micro_batch_size_per_gpu"] == "auto"  # the argument says it
    assert found["gradient_accumulation_steps"] == 2


def test_offload_is_tried_where_nothing_fits_that_moves_less():
    space = Space((0, 3), ("no",), ((8, 1),), offload=("no", "optimizer", "all=disk:/d"))
    candidates = space.candidates()
    ends = ("", "_offload-optimizer", "_offload-all-disk")
    whole, divided = ([f"z{zero}_gas1_tmbspg8{end}" for end in ends] for zero in (0, 3))
    assert [candidate.name for candidate in candidates] == [whole[0], divided[0], whole[1], divided[1], divided[2]]
    bytes_of = {"no": 10, "optimizer": 6, "all=disk:/d": 2}
    forecasts = {candidate: Forecast(bytes_of[candidate.offload]) for candidate in candidates}
    for usable, offload, num_left in ((10, "no", 0), (9, "optimizer", 2), (5, "all=disk:/d", 4)):
        queue, left = sort_out(candidates, forecasts, usable, Tuning())
        assert {candidate.offload for candidate in queue} == {offload} and len(left) == num_left
    assert sort_out(candidates, forecasts, 1, Tuning()) == ([], candidates)
