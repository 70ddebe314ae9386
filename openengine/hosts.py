"""Hosts as people write them: what can be listened on, what others can connect to, how they stand in an address.

An IPv6 address may come in brackets. What looks like a number is never a name: resolvers read "0" and "0x0" as 0.0.0.0.
"""

from __future__ import annotations

import ipaddress
import re

from openengine.errors import InvalidArgument

__all__ = ["bare_host", "check_host", "check_reachable", "is_wildcard", "with_port"]

_MAX_NAME = 253
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")


def check_host(name: str, host: object) -> None:
    """Raises InvalidArgument unless `host` is an address or a host name; the error calls it `name`."""
    if not isinstance(host, str) or (_address(host) is None and not _is_name(host)):
        raise InvalidArgument(
            f"{name} {host!r:.80} is no IP address and no host name; give one, without a scheme or a port"
        )
    address = _address(host)
    if address is not None and address.is_multicast:
        raise InvalidArgument(f"{name} {host!r:.80} is a multicast address; give one of a single machine")


def check_reachable(name: str, host: object) -> None:
    """As `check_host`, and also raises for a wildcard, to which nobody can connect."""
    check_host(name, host)
    if is_wildcard(host):
        raise InvalidArgument(f"{name} {host!r:.80} is a wildcard; give a name or address that others can reach")


def is_wildcard(host: str) -> bool:
    """Whether nobody can connect to `host`, which only says where to listen: 0.0.0.0, :: and other ways to write them."""
    address = _address(host)
    return address is not None and address.is_unspecified


def bare_host(host: str) -> str:
    """`host` without the brackets of an IPv6 address."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def with_port(host: str, port: int) -> str:
    """`host:port`, with brackets where the host has colons of its own."""
    host = bare_host(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(bare_host(host))
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _is_name(host: str) -> bool:
    labels = host.removesuffix(".").split(".")
    is_short = len(host) <= _MAX_NAME
    return is_short and all(map(_LABEL.fullmatch, labels)) and not _NUMBER.fullmatch(labels[-1])
