"""What counts as an anomaly, by numbers alone."""

import math

import pytest

from paceline_lens.observe.anomalies import AnomalyOptions, Detector, StepFacts, flattened, strongest

ALL = AnomalyOptions(nan="skip", loss_spike="rollback", gradient_norm="log", warmup=4, window=8)


def kinds(detector: Detector, **facts: float) -> list[str]:
    return [anomaly.kind for anomaly in detector.judge(StepFacts(**facts))]


def warm(options: AnomalyOptions = ALL) -> Detector:
    detector = Detector(options)
    for loss in (1.0, 1.2, 0.8, 1.1, 0.9):
        assert kinds(detector, loss=loss, norm=2 * loss) == []
    return detector


def test_each_kind_is_seen():
    # Median 1.0; the median absolute deviation is 0.1, so that 6 deviations are 0.89.
    assert kinds(warm(), loss=1.88) == []
    assert kinds(warm(), loss=1.9) == ["loss_spike"]
    assert kinds(warm(), loss=0.0) == [], "a low loss is no spike"
    assert kinds(warm(), loss=1.0, norm=19.9) == []
    assert kinds(warm(), loss=1.0, norm=20.1) == ["gradient_norm"]
    assert kinds(warm(), bad_losses=1, bad_gradients=2) == ["nan"]
    assert kinds(warm(), loss=1.0, bad_gradients=2) == ["nan"]
    assert kinds(warm(), loss=5.0, norm=50.0) == ["loss_spike", "gradient_norm"]


def test_nothing_is_judged_before_the_warm_up():
    detector = Detector(ALL)
    assert [kinds(detector, loss=loss) for loss in (1.0, 1.0, 1.0, 500.0)] == [[]] * 4
    assert kinds(Detector(AnomalyOptions(loss_spike="log", warmup=100, window=4)), loss=1.0) == []


def test_rounding_is_no_spike_where_losses_do_not_vary():
    detector = Detector(ALL)
    for _ in range(8):
        detector.judge(StepFacts(loss=1.0))
    assert kinds(detector, loss=1.05) == []
    assert kinds(detector, loss=1.07) == ["loss_spike"]


def test_a_step_that_is_not_taken_is_not_remembered():
    detector = warm()
    before = detector.state_dict()
    assert strongest(detector.judge(StepFacts(loss=9.0, norm=100.0))) == "rollback"
    assert detector.state_dict() == before
    assert strongest(detector.judge(StepFacts(loss=1.0, norm=100.0))) == "log"
    assert detector.state_dict() != before
    detector.judge(StepFacts(bad_losses=1, loss=math.nan))
    assert all(math.isfinite(loss) for loss in detector.state_dict()["losses"])


def test_a_new_level_that_is_only_logged_becomes_the_usual_one():
    detector = Detector(AnomalyOptions(loss_spike="log", warmup=4, window=4))
    losses = [1.0, 1.1, 0.9, 1.0, 8.0, 8.1, 7.9, 8.0]
    assert [bool(kinds(detector, loss=loss)) for loss in losses] == [False] * 4 + [True, True, False, False]


def test_a_restored_detector_decides_alike():
    detector, restored = warm(), Detector(ALL)
    restored.load_state_dict(detector.state_dict())
    for facts in (StepFacts(loss=1.88, norm=3.0), StepFacts(loss=2.2), StepFacts(loss=1.3, norm=24.0)):
        assert restored.judge(facts) == detector.judge(facts)
    smaller = Detector(AnomalyOptions(window=4))
    smaller.load_state_dict(detector.state_dict())
    assert len(smaller.state_dict()["losses"]) == 4


def test_what_is_not_asked_for_is_not_judged():
    detector = warm(AnomalyOptions(nan="log", warmup=4))
    assert kinds(detector, loss=1e9, norm=1e9) == []


def test_the_texts_say_the_numbers():
    (nan,) = warm().judge(StepFacts(bad_losses=3, first_bad_rank=2))
    assert nan.text == "the loss is not a finite number on rank 2 and 2 more." and nan.value is None
    (spike,) = warm().judge(StepFacts(loss=4.0))
    assert spike.text.startswith("the loss is 4, above 1.8") and spike.value == 4.0 and spike.limit < 1.9


@pytest.mark.parametrize(
    ("block", "options"),
    [
        ({"nan": "skip", "window": 8}, {"nan": "skip", "window": 8}),
        ({"loss_spike": {"action": "stop", "deviations": 4}}, {"loss_spike": "stop", "loss_spike_deviations": 4}),
        ({"gradient_norm": {"factor": 3}}, {"gradient_norm": "log", "gradient_norm_factor": 3}),
        ({"nan": {"action": "log"}}, {"nan": "log"}),
    ],
)
def test_blocks_are_flattened(block, options):
    assert flattened(block) == options
