"""`deprecated`: the name works as before, and each line that uses it is told once what to use instead."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest

from paceline.base.deprecated import DEPRECATIONS, Deprecation, deprecated


@deprecated(since="0.3.0", removed_in="0.5.0", use="double(x)")
def twice(number: int) -> int:
    """Returns twice the number."""
    return 2 * number


@deprecated(since="0.3.0", removed_in="0.5.0", use="Point(x, y)")
class Pair:
    """Two numbers."""

    def __init__(self, first: int) -> None:
        self.first = first

    @deprecated(since="0.4.0", removed_in="0.6.0", use="pair.first")
    def get(self) -> int:
        return self.first


@pytest.fixture(autouse=True, scope="module")
def none_left_behind() -> Any:
    yield
    for name in [name for name in DEPRECATIONS if name.startswith(__name__)]:
        del DEPRECATIONS[name]


def test_a_function_works_and_names_the_line_that_called_it() -> None:
    with pytest.warns(FutureWarning) as caught:
        assert twice(3) == 6
    (warning,) = caught
    assert warning.filename == __file__
    assert all(part in str(warning.message) for part in ("twice", "0.3.0", "0.5.0", "`double(x)`"))
    assert twice.__name__ == "twice" and "use `double(x)`" in (twice.__doc__ or "")
    assert "0.5.0" in twice.__deprecated__  # type: ignore[attr-defined]


def test_a_class_stays_the_same_class() -> None:
    with pytest.warns(FutureWarning, match="Pair is deprecated") as caught:
        pair = Pair(4)
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning, match=r"Pair\.get is deprecated since Paceline 0\.4\.0"):
        assert pair.get() == 4
    # Nothing is constructed anew here.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(pickle.loads(pickle.dumps(pair)), Pair)


def test_all_of_them_are_listed() -> None:
    listed = {name.removeprefix(f"{__name__}."): entry for name, entry in DEPRECATIONS.items() if __name__ in name}
    assert set(listed) == {"twice", "Pair", "Pair.get"}
    assert listed["twice"] == Deprecation("0.3.0", "0.5.0", "double(x)")
