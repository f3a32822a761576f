"""Tells that a command has started this script, and on which devices."""

from __future__ import annotations

from paceline.compat.accelerate.test_utils.testing import device_count, torch_device


def main() -> None:
    """Prints the number of devices."""
    print(f"Successfully ran on {device_count} {torch_device} device{'' if device_count == 1 else 's'}")


if __name__ == "__main__":
    main()
