"""Prints the devices of this host; a test of a launcher starts it to see that the launcher works."""

from __future__ import annotations

from paceline_accelerate.test_utils.testing import device_count, torch_device


def main() -> None:
    """Prints the number and the type of the devices."""
    noun = "device" if device_count == 1 else "devices"
    print(f"Successfully ran on {device_count} {torch_device} {noun}")


if __name__ == "__main__":
    main()
