# SPDX-License-Identifier: Apache-2.0
"""The address under which the other ranks reach this process."""

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from moevement_ext.errors import HostMemoryError

_VARIABLES = ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME')
# Addresses for documentation (RFC 5737 and 3849); the route to them is the default route.
_ELSEWHERE = {socket.AF_INET: '192.0.2.1', socket.AF_INET6: '2001:db8::1'}


def host_identity() -> str:
    """Name of the real host: the same for all emulated nodes, unique per machine."""
    boot = ''
    with suppress(OSError), open('/proc/sys/kernel/random/boot_id') as file:
        boot = file.read().strip()
    return f'{socket.gethostname()}/{boot}'


def local_host(interface: str | None = None, several_hosts: bool = False) -> str:
    """IP under which the other ranks reach this host; sends no packet.

    In order of preference: `interface`, or that of gloo's and NCCL's variables; the interface
    towards the job's master (`MASTER_ADDR`); the default route; the only interface. With
    `several_hosts` loopback is not usable. Raises `HostMemoryError` if
    the interface has no address, or none can be chosen.
    """
    addresses = _addresses()
    if interface is not None:
        return _of_interfaces([interface], addresses, f'interface={interface}', several_hosts)
    for variable in _VARIABLES:
        if value := os.environ.get(variable):
            names = _named(value, addresses, exact=variable == _VARIABLES[0])
            return _of_interfaces(names, addresses, f'{variable}={value}', several_hosts)
    master = os.environ.get('MASTER_ADDR', '127.0.0.1')
    facing = _facing(master)
    # Debian maps a host's own name to 127.0.1.1, so on its own host the master is loopback.
    if facing is not None and not (several_hosts and _is_loopback(facing)):
        return facing
    routed = [ip for ip in map(_facing, _ELSEWHERE.values()) if ip and not _is_loopback(ip)]
    others = {name: ips for name, ips in addresses.items() if not _is_loopback(ips[0])}
    if routed or len(others) == 1:
        return routed[0] if routed else others.popitem()[1][0]
    raise HostMemoryError(
        f'MASTER_ADDR {master} is the loopback interface on {socket.gethostname()}, which other '
        f'hosts cannot reach, and of {", ".join(sorted(others)) or "no interface"} none can be '
        f'preferred. Name the interface by GLOO_SOCKET_IFNAME.'
    )


def _addresses() -> dict[str, list[str]]:
    """Addresses usable from other hosts, IPv4 first, by active interface."""
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        ips = [entry.address for entry in entries if entry.family in _ELSEWHERE]
        # Link-local addresses need an interface number of the connecting host.
        usable = [ip for ip in ips if not ipaddress.ip_address(ip.partition('%')[0]).is_link_local]
        if name in up and usable:
            found[name] = sorted(usable, key=lambda ip: ':' in ip)
    return found


def _named(value: str, known: Mapping[str, list[str]], exact: bool) -> list[str]:
    """The interfaces that a variable lists or, after a `^`, excludes.

    NCCL's lists have prefixes, unless they begin with `=`; gloo's have names (`exact`) and no
    exceptions, but with NCCL alone users often set one value for both.
    """
    listed = value.removeprefix('^')
    names = tuple(name for name in listed.removeprefix('=').split(',') if name)
    if listed.startswith('=') or (exact and listed == value):
        chosen = [name for name in names if name in known]
    else:
        chosen = [name for name in known if name.startswith(names)]
    if listed == value:
        return chosen
    others = (name for name in known if name not in chosen)
    return [name for name in others if not all(map(_is_loopback, known[name]))]


def _of_interfaces(
    names: Sequence[str], addresses: Mapping[str, list[str]], setting: str, several_hosts: bool
) -> str:
    """The address that a setting selects, if the other hosts can reach it."""
    found = [ip for name in names for ip in addresses.get(name, [])]
    useful = [ip for ip in found if not (several_hosts and _is_loopback(ip))]
    if useful:
        return useful[0]
    problem = 'no such interface is up with an address'
    if found:
        problem = 'is the loopback interface, which the other hosts of the job cannot reach'
    raise HostMemoryError(
        f'{setting}: {problem} on {socket.gethostname()}; there are '
        f'{", ".join(sorted(addresses)) or "none"}. Name one of them by {_VARIABLES[0]}.'
    )


def _facing(host: str) -> str | None:
    """IP of the interface for packets to `host`; None without a route."""
    with suppress(OSError):
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    return None


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition('%')[0])
    return (getattr(ip, 'ipv4_mapped', None) or ip).is_loopback
