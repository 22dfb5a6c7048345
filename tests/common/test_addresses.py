from __future__ import annotations

from ipaddress import ip_address

import pytest

from common.addresses import is_own, is_public, parse_address

NOT_PUBLIC = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "100.127.255.255"),
    *("127.0.0.1", "127.255.255.254", "168.63.129.16", "169.254.0.1", "169.254.169.254", "172.16.0.1"),
    *("172.31.255.255", "192.0.0.1", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.0.1", "192.168.255.255"),
    *("198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1"),
    *("255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "2606:4700::1%eth0", "fec0::1", "fc00::1"),
    *("fd00:ec2::254", "ff02::1", "ff0e::1", "100::1", "5f00::1", "4000::1", "e000::1"),
    # IPv4 inside of IPv6: mapped, compatible, translated, NAT64, 6to4, Teredo, ISATAP beside a local prefix
    *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "::8.8.8.8", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1"),
    *("64:ff9b::808:808", "64:ff9b:1::a00:1", "2002:7f00:1::1", "2002:808:808::1", "2001:0:7f00:1::", "2001::1"),
    *("fe80::5efe:127.0.0.1", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "3fff::1"),
]
PUBLIC = [
    *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255"),
    *("128.0.0.0", "168.63.129.15", "169.253.255.255", "172.15.255.255", "172.32.0.0", "192.167.255.255"),
    *("192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255", "2606:4700::1111", "2001:4860:4860::8888"),
    *("2001:200::1", "2003::1", "2a00:1450::1", "3ffe::1"),
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_public(ip_address(address))


def test_own_addresses() -> None:
    assert is_own(ip_address("127.0.0.1"))
    assert not is_own(ip_address("8.8.8.8"))
    assert not is_own(ip_address("2001:4860:4860::8888"))


@pytest.mark.parametrize("text", ["127.0.0.1", "::1", "[::1]"])
def test_usual_spellings(text: str) -> None:
    assert parse_address(text) == ip_address(text.strip("[]"))


@pytest.mark.parametrize("text", ["", "127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "localhost", "1.2.3.4.5"])
def test_what_is_no_address(text: str) -> None:
    assert parse_address(text) is None
