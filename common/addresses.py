"""Addresses of hosts: which are machines on the internet, and which are somebody's own."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final, TypeAlias

IPAddress: TypeAlias = IPv4Address | IPv6Address
Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[IPAddress]]]

# IANA's special-purpose registry. `ipaddress.is_global` says much the same, but differs between versions of Python.
_NOT_PUBLIC_V4: Final[Sequence[IPv4Network]] = [
    IPv4Network(block)
    for block in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",
        "100.64.0.0/10",  # behind a provider's NAT
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's services for a machine of its own
        "169.254.0.0/16",  # link-local, and metadata services of clouds
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocols; Oracle's metadata service
        "192.0.2.0/24",  # documentation, as the next two with 198.51 and 203
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
]
# All of global unicast. What lies outside is loopback, link-local, ULA, multicast, reserved, or an IPv4 address in
# disguise (mapped, compatible, NAT64).
_UNICAST_V6: Final = IPv6Network("2000::/3")
_NOT_PUBLIC_V6: Final[Sequence[IPv6Network]] = [
    IPv6Network(block)
    for block in (
        "2001::/23",  # protocols: Teredo, which embeds IPv4 addresses, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which embeds IPv4 addresses
        "3fff::/20",  # documentation
    )
]


def is_public(address: IPAddress) -> bool:
    """Whether an address belongs to one machine on the internet."""
    if isinstance(address, IPv4Address):
        return not any(address in block for block in _NOT_PUBLIC_V4)
    if address.scope_id is not None:
        return False
    return address in _UNICAST_V6 and not any(address in block for block in _NOT_PUBLIC_V6)


def is_own(address: IPAddress) -> bool:
    """Whether an address is one of this machine's. What listens there may be shielded from the internet."""
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def parse_address(text: str) -> IPAddress | None:
    """The address that a text spells in the usual way, in brackets or not; None for anything else."""
    try:
        return ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


async def resolve(host: str, port: int) -> list[IPAddress]:
    """The addresses of a host, as the system knows them. Raises OSError."""
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_resolvers(), look_up)
    return [ipaddress.ip_address(address[0]) for *_, address in found]


@cache
def _resolvers() -> ThreadPoolExecutor:
    # Their own, since a name server that does not answer holds a thread for longer than anybody waits for it.
    return ThreadPoolExecutor(8, thread_name_prefix="resolver")
