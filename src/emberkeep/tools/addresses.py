"""Which addresses are public: everything else is somebody's own network, or this machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from emberkeep.errors import ConfigError

_RESERVED_4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this machine
        "10.0.0.0/8",
        "100.64.0.0/10",  # behind a provider's NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, among it the metadata of cloud machines
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",
    )
)
_PUBLIC_6 = IPv6Network("2000::/3")
_RESERVED_6 = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # Teredo and others that lead elsewhere
        "2001:db8::/32",
        "2002::/16",  # 6to4: any IPv4 address
        "3fff::/20",
    )
)
_NAT64 = IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether it belongs to the internet. IPv4 inside of IPv6 counts as IPv4. Raises ValueError."""
    parsed = ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv6Address):
        inner = _inner(parsed)
        if inner is None:
            return parsed in _PUBLIC_6 and not any(parsed in network for network in _RESERVED_6)
        parsed = inner
    return not any(parsed in network for network in _RESERVED_4)


def _inner(address: IPv6Address) -> IPv4Address | None:
    """Names of the internet get such addresses where a network has no IPv4."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped


@dataclass(frozen=True, slots=True)
class Exceptions:
    """Hosts that may be reached though their addresses are not public."""

    _hosts: frozenset[tuple[str, int | None]]

    @classmethod
    def of(cls, entries: Iterable[str]) -> Exceptions:
        """Each is a host, or host:port. Raises ConfigError."""
        return cls(frozenset(_parsed(entry) for entry in entries))

    def have(self, host: str, port: int) -> bool:
        return not self._hosts.isdisjoint({(host.lower(), None), (host.lower(), port)})


def _parsed(entry: str) -> tuple[str, int | None]:
    host, colon, port = entry.rpartition(":")
    is_bare = not colon or (":" in host and not host.endswith("]"))  # a name, or IPv6 without a port
    if is_bare:
        host, port = entry, ""
    host = host.removeprefix("[").removesuffix("]").lower()
    if not host or "/" in host or (not is_bare and not (port.isascii() and port.isdigit())):
        raise ConfigError(f"http_private: {entry!r} is neither a host nor host:port.")
    return host, int(port) if port else None
