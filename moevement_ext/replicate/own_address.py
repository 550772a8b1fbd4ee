# SPDX-License-Identifier: Apache-2.0
"""The address under which the other ranks reach this process."""

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence

import psutil

from moevement_ext.errors import HostMemoryError

_FLAG = '--sparse-ckpt-interface'
_VARIABLES = ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME')
# Addresses for documentation (RFC 5737 and 3849); the route to them is the default route.
_ELSEWHERE = {socket.AF_INET: '192.0.2.1', socket.AF_INET6: '2001:db8::1'}


def host_identity() -> str:
    """Name of the real host: the same for all emulated nodes, unique per machine."""
    try:
        with open('/proc/sys/kernel/random/boot_id') as file:
            boot = file.read().strip()
    except OSError:
        boot = ''
    return f'{socket.gethostname()}/{boot}'


def local_host(interface: str | None = None, several_hosts: bool = False) -> str:
    """IP under which the other ranks reach this host; sends no packet.

    In order of preference: `interface` (`--sparse-ckpt-interface`), or that of gloo's and
    NCCL's variables; the interface towards the job's master (`MASTER_ADDR`); the default route;
    the only interface. With `several_hosts` loopback is not usable. Raises `HostMemoryError` if
    the interface has no address, or none can be chosen.
    """
    addresses = _addresses()
    if interface is not None:
        return _of_interfaces([interface], addresses, f'{_FLAG} {interface}', several_hosts)
    for variable in _VARIABLES:
        value = os.environ.get(variable)
        if value:
            names = _named(value, addresses, exact=variable == _VARIABLES[0])
            return _of_interfaces(names, addresses, f'{variable}={value}', several_hosts)
    master = os.environ.get('MASTER_ADDR', '127.0.0.1')
    facing = _facing(master)
    # Debian maps a host's own name to 127.0.1.1, so on its own host the master is loopback.
    if facing is not None and not (several_hosts and _is_loopback(facing)):
        return facing
    return _of_this_host(addresses, master)


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

    In NCCL's syntax a list has prefixes, unless it begins with `=` or `exact` is set. Gloo
    supports names only, and no exceptions; but with NCCL alone, users often set one value for
    both.
    """
    listed = value.removeprefix('^')
    names = tuple(name for name in listed.removeprefix('=').split(',') if name)
    if listed.startswith('=') or (exact and listed == value):
        chosen = [name for name in names if name in known]
    else:
        chosen = [name for name in known if name.startswith(names)]
    if listed == value:
        return chosen
    left = [name for name in known if name not in chosen]
    return [name for name in left if not all(map(_is_loopback, known[name]))]


def _of_interfaces(
    names: Sequence[str], addresses: Mapping[str, list[str]], setting: str, several_hosts: bool
) -> str:
    """The address that a setting selects, if the other hosts can reach it."""
    found = [ip for name in names for ip in addresses.get(name, [])]
    useful = [ip for ip in found if not (several_hosts and _is_loopback(ip))]
    if useful:
        return useful[0]
    if found:
        problem = 'is the loopback interface, which the other hosts of the job cannot reach'
    else:
        problem = 'no such interface is up with an address'
    raise HostMemoryError(
        f'{setting}: {problem} on {socket.gethostname()}; there are '
        f'{", ".join(sorted(addresses)) or "none"}. Name one of them by {_FLAG}.'
    )


def _facing(host: str) -> str | None:
    """IP of the interface for packets to `host`; None without a route."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _of_this_host(addresses: Mapping[str, list[str]], master: str) -> str:
    for target in _ELSEWHERE.values():
        facing = _facing(target)
        if facing is not None and not _is_loopback(facing):
            return facing
    others = {name: ips for name, ips in addresses.items() if not _is_loopback(ips[0])}
    if len(others) == 1:
        return others.popitem()[1][0]
    raise HostMemoryError(
        f'MASTER_ADDR {master} is the loopback interface on {socket.gethostname()}, which other '
        f'hosts cannot reach, and of {", ".join(sorted(others)) or "no interface"} none can be '
        f'preferred. Name the interface by {_FLAG} (or GLOO_SOCKET_IFNAME).'
    )


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition('%')[0])
    mapped = getattr(ip, 'ipv4_mapped', None)
    return (mapped or ip).is_loopback
