"""Forecasts that are kept for a watched run of the same script."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.planner.known_forecasts import KnownForecast, recall, remember


def test_a_forecast_is_found_again_also_one_of_an_earlier_version(tmp_path: Path) -> None:
    assert remember("key", KnownForecast(12.5, 3e9, 7 << 20), tmp_path) == ""
    assert recall("key", tmp_path) == KnownForecast(12.5, 3e9, 7 << 20)
    (tmp_path / "key.json").write_text(json.dumps({"step_ms": 12.5, "flops": 3e9}))
    assert recall("key", tmp_path) == KnownForecast(12.5, 3e9, 0)
    assert recall("other", tmp_path) is None
