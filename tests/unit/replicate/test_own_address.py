# SPDX-License-Identifier: Apache-2.0
"""The addresses of this machine, announced to others."""

import ipaddress
import re
import socket

import psutil
import pytest

from moevement_ext.errors import HostMemoryError
from moevement_ext.replicate import own_address
from moevement_ext.replicate.own_address import local_host
from tests.support.messages import messages

ROUTABLE = {
    name: [
        entry.address
        for entry in entries
        if entry.family == socket.AF_INET and not ipaddress.ip_address(entry.address).is_loopback
    ]
    for name, entries in psutil.net_if_addrs().items()
}
ROUTABLE = {name: ips for name, ips in ROUTABLE.items() if ips}
MASTERS = ['127.0.0.1', '127.0.1.1', 'localhost']


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ('GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('MASTER_ADDR', '127.0.0.1')


def is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip).is_loopback


@pytest.mark.parametrize('master', MASTERS)
def test_one_host_alone_stays_on_loopback(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.setenv('MASTER_ADDR', master)
    assert is_loopback(local_host())


@pytest.mark.skipif(not ROUTABLE, reason='this machine has only a loopback interface')
@pytest.mark.parametrize('master', MASTERS)
def test_loopback_is_not_announced_to_other_hosts(
    monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    monkeypatch.setenv('MASTER_ADDR', master)
    announced = local_host(several_hosts=True)
    assert not is_loopback(announced)
    socket.create_server((announced, 0)).close()


def test_where_nothing_can_be_announced_the_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_address, '_facing', lambda host: None)
    for found in ({}, {'eth0': ['10.0.0.1'], 'docker0': ['172.17.0.1']}):
        monkeypatch.setattr(own_address, '_addresses', lambda found=found: {'lo': ['::1'], **found})
        with pytest.raises(HostMemoryError, match='Name the interface by GLOO_SOCKET_IFNAME'):
            local_host(several_hosts=True)


def test_the_only_interface_is_taken_where_there_is_no_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_address, '_facing', lambda host: None)
    found = {'lo': ['127.0.0.1'], 'eth0': ['10.0.0.1', '2001:db8::7']}
    monkeypatch.setattr(own_address, '_addresses', lambda: found)
    assert local_host(several_hosts=True) == '10.0.0.1'


def test_requested_interface_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MASTER_ADDR', '192.0.2.7')
    assert local_host('lo') == '127.0.0.1'
    with pytest.raises(HostMemoryError, match='interface=nosuch0.*there are .*lo'):
        local_host('nosuch0')


@pytest.mark.parametrize(('variable', 'value', 'expected'), messages('interfaces'))
def test_settings_of_gloo_and_nccl_select_the_interface(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    found = {'lo': ['127.0.0.1'], 'eth0': ['10.0.0.1'], 'eth1': ['10.1.0.1'], 'ib0': ['10.2.0.1']}
    monkeypatch.setattr(own_address, '_addresses', lambda: found)
    monkeypatch.setenv(variable, value)
    if not expected:
        with pytest.raises(HostMemoryError, match=re.escape(f'{variable}={value}')):
            local_host()
    else:
        assert local_host() == expected


@pytest.mark.parametrize('setting', ['GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME', 'interface'])
def test_no_setting_gives_other_hosts_an_address_that_only_this_one_reaches(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    found = {'lo': ['127.0.0.1'], 'eth0': ['10.0.0.1'], 'lo1': ['::1']}
    monkeypatch.setattr(own_address, '_addresses', lambda: found)
    for chosen in ('lo', 'lo1'):
        flag = chosen if setting == 'interface' else None
        if flag is None:
            monkeypatch.setenv(setting, f'={chosen}' if setting.startswith('NCCL') else chosen)
        assert is_loopback(local_host(flag))
        with pytest.raises(
            HostMemoryError, match=f'{chosen}: is the loopback.*eth0.*GLOO_SOCKET_IFNAME'
        ):
            local_host(flag, several_hosts=True)
    if setting != 'interface':
        monkeypatch.setenv(setting, 'lo,eth0')
        assert local_host(several_hosts=True) == '10.0.0.1'
    found['lo'].append('10.9.0.1')  # a host that announces its own route
    assert local_host('lo', several_hosts=True) == '10.9.0.1'
