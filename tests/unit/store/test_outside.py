# SPDX-License-Identifier: Apache-2.0
"""The process that serves a store to a job, and how workers and torchrun agents come to use it."""

import signal
import socket
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from moevement_ext.config import ConfigurationError, SparseCheckpointConfig
from moevement_ext.launch import torchrun, torchrun_agent
from moevement_ext.membership.rendezvous import launcher_store
from moevement_ext.store import connect, listen, use_outside_store
from tests.distributed.harness.cluster import ROOT
from tests.distributed.harness.store import OutsideStore

pytestmark = pytest.mark.timed

TIMEOUT = timedelta(seconds=60)


def test_lost_server_is_replaced_and_ends_with_the_program() -> None:
    store = OutsideStore()
    host, _, port = store.address.partition(':')
    before = connect(host, int(port), TIMEOUT)
    before.set('key', 'value')
    address = store.address
    store.lose()
    assert store.address == address
    with pytest.raises(DistError):
        before.check(['key'])
    assert not connect(host, int(port), TIMEOUT).check(['key'])
    (server,) = psutil.Process(store.pid).children()
    assert store.close() == 128 + signal.SIGTERM
    assert not server.is_running()


def test_server_ends_with_its_parent() -> None:
    store = OutsideStore()
    (server,) = psutil.Process(store.pid).children()
    psutil.Process(store.pid).kill()
    psutil.wait_procs([server], timeout=60.0)
    assert not server.is_running()
    store.close()


@pytest.mark.thorough
def test_store_with_a_closed_log_continues() -> None:
    store = OutsideStore()
    host, _, port = store.address.partition(':')
    (server,) = psutil.Process(store.pid).children()
    store.hang_up()
    server.kill()
    psutil.wait_procs([server], timeout=60.0)
    assert not connect(host, int(port), TIMEOUT).check(['key'])
    store.close()


@pytest.mark.parametrize(
    ('host', 'port'),
    [
        ('192.0.2.7', 0),
        ('no.such.host.invalid', 0),
        ('127.0.0.1', 65536),
        ('0.0.0.0', 0),
        ('::', 0),
    ],
)
def test_unreachable_listen_address_is_refused(host: str, port: int) -> None:
    with pytest.raises(ConfigurationError, match=f'--host {host} --port {port}: cannot listen'):
        listen(host, port)


def test_command_line_error_is_one_line() -> None:
    command = [sys.executable, '-m', 'moevement_ext.store', '--host', '192.0.2.7', '--port', '0']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = [text for text in done.stderr.splitlines() if 'error' in text]
    assert '--host 192.0.2.7 --port 0: cannot listen there' in line


SOON = timedelta(seconds=1)
NODE = ['--nnodes', '2', '--node-rank', '1', '--nproc-per-node', '4']


@pytest.fixture
def store() -> TCPStore:
    return TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ('MASTER_ADDR', 'MASTER_PORT', 'TORCHELASTIC_USE_AGENT_STORE'):
        monkeypatch.setenv(name, 'of the launcher')  # restored afterwards


@pytest.mark.usefixtures('environment')
def test_outside_store_replaces_the_launchers(store: TCPStore) -> None:
    config = SparseCheckpointConfig(store=f'127.0.0.1:{store.port}')
    use_outside_store(config, 'run1', TIMEOUT)
    use_outside_store(config, 'run1', TIMEOUT)  # the next rank
    store.set('key', 'value')
    found = launcher_store(TIMEOUT)
    assert found is not None
    assert found.get('key') == b'value'


@pytest.mark.usefixtures('environment')
def test_store_of_another_run_is_refused(store: TCPStore) -> None:
    config = SparseCheckpointConfig(store=f'127.0.0.1:{store.port}')
    use_outside_store(config, 'run1', TIMEOUT)
    with pytest.raises(ConfigurationError, match='--sparse-ckpt-store .* serves the run run1, not'):
        use_outside_store(config, 'run2', TIMEOUT)


def test_unreachable_store_is_named() -> None:
    with socket.socket() as nobody:
        nobody.bind(('127.0.0.1', 0))
        port = nobody.getsockname()[1]
        with pytest.raises(ConfigurationError) as refusal:
            connect('127.0.0.1', port, SOON)
    assert f'--sparse-ckpt-store 127.0.0.1:{port} is not reached: start moevement store' in str(
        refusal.value
    )


@pytest.mark.parametrize('flags', [['--sparse-ckpt-store', 'h:7'], ['--sparse-ckpt-store=h:7']])
def test_agents_use_the_store_of_the_program_flag(flags: list[str]) -> None:
    args = torchrun.parse([*NODE, '--rdzv-conf', 'timeout=9', 'train.py', '--lr', '1', *flags])
    assert (args.rdzv_backend, args.rdzv_endpoint) == ('sparse-ckpt-store', 'h:7')
    assert args.rdzv_conf == 'timeout=9,rank=1'
    assert args.training_script_args == ['--lr', '1', *flags]
    assert torchrun.parse([*NODE, 'train.py', '--lr', '1']).rdzv_backend == 'static'


@pytest.mark.parametrize(
    ('launch', 'flags', 'named'),
    [
        (['--standalone'], ['--sparse-ckpt-store', 'h:7'], 'leave out --standalone'),
        (['--rdzv-backend', 'c10d'], ['--sparse-ckpt-store', 'h:7'], 'leave out --standalone'),
        (['--nnodes', 'abc'], ['--sparse-ckpt-store', 'h:7'], '--nnodes abc must be the number'),
        (['--nnodes', '0'], ['--sparse-ckpt-store', 'h:7'], '--nnodes 0 must be the number'),
        (['--nnodes', '2:4'], ['--sparse-ckpt-store', 'h:7'], '--nnodes 2:4 must be the number'),
        (NODE, ['--sparse-ckpt-store', 'h'], "--sparse-ckpt-store 'h' must be HOST:PORT"),
    ],
)
def test_invalid_flags_are_named(launch: list[str], flags: list[str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        torchrun.parse([*launch, 'train.py', *flags])


def test_agents_reach_a_store_over_ipv6() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip('this machine has no IPv6')
    store = TCPStore('::1', 0, is_master=True, wait_for_workers=False)
    args = torchrun.parse([*NODE, 'train.py', '--sparse-ckpt-store', f'[::1]:{store.port}'])
    params = RendezvousParameters(
        args.rdzv_backend, args.rdzv_endpoint, 'id', 2, 2, rank='1', timeout='60'
    )
    met = torchrun_agent.OutsideStore.create(params).next_rendezvous()
    assert met.bootstrap_store_info.master_addr == '::1'
    met.store.set('key', 'value')
    assert store.get('agents/id/2/key') == b'value'


def test_agent_connects_again_for_each_rendezvous(store: TCPStore) -> None:
    """The store may be another one by then."""
    params = RendezvousParameters(
        'sparse-ckpt-store', f'127.0.0.1:{store.port}', 'id', 2, 2, rank='1', timeout='60'
    )
    handler = torchrun_agent.OutsideStore.create(params)
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    assert (second.rank, second.world_size) == (1, 2)
    assert second.bootstrap_store_info.master_port == store.port
    first.store.set('key', 'value')
    del first
    assert second.store.get('key') == b'value'


@pytest.mark.parametrize('store', [[], ['--sparse-ckpt-store', 'h:7']])
def test_wrong_number_of_processes_is_named(
    store: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    with pytest.raises(SystemExit):
        torchrun.main(['--nproc-per-node', 'abc', 'train.py', *store])
    assert '--nproc-per-node abc must be the number of processes on' in capsys.readouterr().err
