"""The replay of torch's allocator: gaps, streams, and what does not grow twice."""

from paceline_lens.forecast.reserved import reserved

KIB = 1024


def test_a_gap_that_is_too_small_is_not_used() -> None:
    # As around a loss: two results are freed between activations and a third one, and the next is larger than each of them.
    kept, small, large, third, after = range(5)
    entries = [(kept, 100 * KIB), (small, 4 * KIB), (large, 8 * KIB), (third, 8 * KIB)]
    freed = [(small, -4 * KIB), (large, -8 * KIB)]
    assert reserved([*entries, *freed, (after, 12 * KIB)], [""] * 5) == 120 * KIB  # both gaps are one
    assert reserved([*entries, *freed, (after, 13 * KIB)], [""] * 5) == 133 * KIB


def test_the_smallest_gap_that_is_large_enough_is_taken() -> None:
    entries = [(0, 8 * KIB), (1, KIB), (2, 4 * KIB), (3, KIB), (0, -8 * KIB), (2, -4 * KIB), (4, 4 * KIB), (5, 8 * KIB)]
    assert reserved(entries, [""] * 6) == 14 * KIB


def test_the_end_grows_by_what_is_missing() -> None:
    entries = [(0, KIB), (1, 2 * KIB), (1, -2 * KIB), (2, 3 * KIB)]
    assert reserved(entries, [""] * 3) == 4 * KIB


def test_streams_share_nothing() -> None:
    entries = [(0, 4 * KIB), (0, -4 * KIB), (1, 4 * KIB)]
    assert reserved(entries, ["", ""]) == 4 * KIB
    assert reserved(entries, ["", "gather"]) == 8 * KIB


def test_a_storage_that_is_resized_moves() -> None:
    assert reserved([(0, KIB), (1, KIB), (0, KIB)], ["", ""]) == 4 * KIB
    assert reserved([(0, 100)], [""]) == 512
