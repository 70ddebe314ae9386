"""Hosts: which can be listened on, which others can connect to, and how they are written."""

from __future__ import annotations

import pytest

from openengine.errors import InvalidArgument
from openengine.hosts import bare_host, check_host, check_reachable, is_wildcard, with_port

WILDCARDS = ["0.0.0.0", "::", "[::]", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0", "::ffff:0:0"]
NO_HOSTS = ["", " ", "*", "0", "00", "0x0", "1", "300.1.1.1", "1.2.3", "10.0", "http://x", "http://x:1", "x:1", "a b"]
NO_HOSTS += ["unix:/tmp/x", "-a", "a-", "a..b", ".", "a" * 64, "a." * 130, "ä", "a/b", "[a]", "[::1", "224.0.0.1", None]
HOSTS = ["localhost", "worker-1", "a.b.example", "a.b.example.", "my_service", "3com.example", "10.0.0.7", "127.0.0.1"]
HOSTS += ["::1", "[::1]", "fe80::1%eth0", "2001:db8::7"]


@pytest.mark.parametrize("host", WILDCARDS)
def test_a_wildcard_can_be_listened_on_and_not_connected_to(host):
    check_host("host", host)
    assert is_wildcard(host)
    with pytest.raises(InvalidArgument, match="wildcard"):
        check_reachable("host", host)


@pytest.mark.parametrize("host", NO_HOSTS)
def test_what_is_no_host_is_refused_by_name(host):
    with pytest.raises(InvalidArgument, match=r"^advertise_host "):
        check_host("advertise_host", host)


@pytest.mark.parametrize("host", HOSTS)
def test_addresses_and_names_are_hosts(host):
    check_reachable("host", host)
    assert not is_wildcard(host)


def test_an_ipv6_address_has_brackets_before_a_port_only():
    assert with_port("::1", 5) == with_port("[::1]", 5) == "[::1]:5"
    assert with_port("worker-1", 5) == "worker-1:5"
    assert bare_host("[::1]") == bare_host("::1") == "::1"
