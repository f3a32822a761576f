"""Kinds of values: the same text means the same wherever it stands."""

from enum import StrEnum
from pathlib import Path

import pytest

from paceline.config.kinds import ADDRESSES, YES_NO, matching, one_of, seconds, whole
from paceline.config.settings import settings_of


class Precision(StrEnum):
    FP16 = "fp16"


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (whole(1), "4", 4),
        (whole(1), 4, 4),
        (whole(1, auto=True), "Auto", "auto"),
        (whole(0, maximum=65535), " 0 ", 0),
        (seconds(), "1e-1", 0.1),
        (seconds(), 3, 3.0),
        (one_of("no", "fp16"), "FP16", "fp16"),
        (one_of("no", "fp16"), Precision.FP16, "fp16"),
        (matching(r".+", "a file", "FILE"), Path("run.yaml"), "run.yaml"),
        (YES_NO, "on", True),
        (YES_NO, False, False),
    ],
)
def test_a_value_is_read(kind, given, value):
    assert kind.read(given) == value
    assert type(kind.read(given)) is type(value)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (whole(1), "0"),
        (whole(1), "2.5"),
        (whole(1), True),
        (whole(1), "auto"),
        (whole(1), None),
        (whole(0, maximum=65535), "70000"),
        (seconds(), "inf"),
        (seconds(), "nan"),
        (seconds(), 0),
        (one_of("no", "fp16"), "fp8"),
        (matching(r".+", "a file", "FILE"), ["run.yaml"]),
        (YES_NO, "maybe"),
        (ADDRESSES, "host:port"),
        (ADDRESSES, "host0:1,:2"),
    ],
)
def test_another_value_says_what_was_expected(kind, given):
    with pytest.raises(ValueError, match="^" + kind.expected.split("(")[0]):
        kind.read(given)


def test_every_default_is_of_its_kind():
    for each in settings_of().values():
        if each.default not in (None, "", {}):
            assert each.kind.read(each.default) == each.default
