"""Writes numbers with their units, as people read them."""

from __future__ import annotations


def rate(bytes_per_s: float) -> str:
    """Writes a transmission rate in bits per second, as links are labelled: "47.3 Mbit/s"."""
    bits = bytes_per_s * 8
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{_digits(bits / size)} {unit}"
    return f"{_digits(bits / 1e3)} kbit/s"


def num_bytes(count: float) -> str:
    """Writes a number of bytes: "64 MiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{_digits(count / size)} {unit}"
    return f"{count:.0f} bytes"


def seconds(value: float) -> str:
    """Writes a duration: "3.2 s", "0.15 ms"."""
    if value >= 1:
        return f"{_digits(value)} s"
    return f"{_digits(value * 1e3)} ms"


def _digits(value: float) -> str:
    """Writes a number with two or three significant digits."""
    if value >= 100:
        return f"{value:.0f}"
    if value >= 1:
        return f"{value:.3g}"
    return f"{value:.2g}"
