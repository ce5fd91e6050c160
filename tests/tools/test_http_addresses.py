from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.errors import ConfigError
from emberkeep.tools.http_tools import Exceptions, is_public


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::5db8:d822", "100.63.1.1"]
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.8",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:a00:1::",
        "3fff::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "5f00::1",
    ],
)
def test_all_others_are_not(address: str) -> None:
    assert not is_public(address)


@given(st.ip_addresses(v=4))
def test_an_address_is_judged_alike_in_every_dress(address: object) -> None:
    assert is_public(f"::ffff:{address}") == is_public(f"64:ff9b::{address}") == is_public(str(address))


@given(st.ip_addresses())
def test_what_python_calls_private_is_never_public(address: object) -> None:
    if address.is_private or address.is_multicast or address.is_loopback or address.is_link_local:  # type: ignore[attr-defined]
        assert not is_public(str(address))


def test_exceptions_are_hosts_with_or_without_a_port() -> None:
    exceptions = Exceptions.of(["nas.local", "LOCALHOST:8080", "[::1]:9000", "fd00::5"])
    assert exceptions.have("nas.local", 80) and exceptions.have("NAS.local", 9999)
    assert exceptions.have("localhost", 8080) and not exceptions.have("localhost", 80)
    assert exceptions.have("::1", 9000) and not exceptions.have("::1", 80)
    assert exceptions.have("fd00::5", 443)
    assert not exceptions.have("evil-nas.local", 80)


@pytest.mark.parametrize("entry", ["", ":80", "host:", "host:port", "http://host", "10.0.0.0/8"])
def test_an_exception_that_is_no_host_is_an_error(entry: str) -> None:
    with pytest.raises(ConfigError, match="http_private"):
        Exceptions.of([entry])
