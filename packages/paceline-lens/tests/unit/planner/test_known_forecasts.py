"""Forecasts that are kept for a watched run of the same script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline_lens.forecast.known_forecasts import KnownForecast, recall, remember


def test_a_forecast_is_found_again_also_one_of_an_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert remember("key", KnownForecast(12.5, 3e9, 7 << 20)) == ""
    assert recall("key") == KnownForecast(12.5, 3e9, 7 << 20)
    (saved,) = tmp_path.rglob("key.json")
    saved.write_text(json.dumps({"step_ms": 12.5, "flops": 3e9}))
    assert recall("key") == KnownForecast(12.5, 3e9, 0)
    assert recall("other") is None
