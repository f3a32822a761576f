"""Separates the host of an address from its port."""

from __future__ import annotations


def host_and_port(address: str) -> tuple[str, str]:
    """Returns the host and the port of HOST, HOST:PORT, [IPV6]:PORT or IPV6. The port is "" if the address has none."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, rest.removeprefix(":")
    # More than one colon without brackets: an IPv6 address without a port.
    if address.count(":") > 1:
        return address, ""
    host, _, port = address.partition(":")
    return host, port
