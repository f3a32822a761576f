"""Whether the server of a tracker answers."""

from __future__ import annotations


def knock(address: str) -> None:
    """Raises within 5 s if no server answers at an address, with any status; an address that is no URL of HTTP is skipped."""
    if address.startswith(("http://", "https://")):
        import requests

        requests.head(address, timeout=5)
