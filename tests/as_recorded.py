"""Compares what Paceline answers with what was recorded from the library whose names it serves."""

from __future__ import annotations

import pytest


def assert_close(found, expected, where=""):
    """Equal but for the last digit of float32 sums: our CPU optimizers step in one fused kernel."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=2e-5, rel=2e-5), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_close(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), f"{where}: {found} != {expected}"
        for place, each in enumerate(expected):
            assert_close(found[place], each, f"{where}[{place}]")
    else:
        assert found == expected, where


def compare(answered, expected, where: str) -> None:
    """Equal; an error must be catchable as the Python class that accelerate raises."""
    if isinstance(expected, dict) and "raises" in expected:
        assert isinstance(answered, dict) and "raises" in answered, f"{where}: {answered} in place of an error"
        assert expected["raises"][0] in answered["raises"], f"{where}: {answered} cannot be caught as {expected}"
        return
    assert_close(answered, expected, where)
