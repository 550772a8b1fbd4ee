# SPDX-License-Identifier: Apache-2.0
"""The process that serves a store to a job."""

import signal
import subprocess
import sys
from datetime import timedelta

import psutil
import pytest
from torch.distributed import DistError

from moevement_ext.config import ConfigurationError
from moevement_ext.store import connect, listen
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
