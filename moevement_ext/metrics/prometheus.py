# SPDX-License-Identifier: Apache-2.0
"""All ranks of a host behind one port of Prometheus.

Each process keeps its values in small files of one directory, as the library does for programs of
several processes. One of them answers on the port: it holds an flock on the directory, and when it
is gone another one takes over. Counters of processes that are gone stay, so that those of a rank
add up over its lives; their gauges go.
"""

import contextlib
import fcntl
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from moevement_ext.config import ConfigurationError
from moevement_ext.memory import private
from moevement_ext.memory.mapped import reserve
from moevement_ext.metrics.instruments import INSTRUMENTS, Instrument, Kind
from moevement_ext.metrics.page import PageServer, listen

logger = logging.getLogger(__name__)

_DIRECTORY = 'PROMETHEUS_MULTIPROC_DIR'
_TRY_AGAIN_S = 2.0
_FILE_KINDS = ('counter', 'gauge_livemostrecent')
_FILE_BYTES = 256 * 1024
"""Room for some 800 values; the library's own files have holes, and grow when they are full."""
_PORT_TAKEN = (
    '--sparse-ckpt-metrics %d: nobody can read the metrics of this host, since another program, or '
    'another run, has that port: %s. They are there as soon as it is free; else give this run '
    'another port.'
)


class PrometheusRecorder:
    """Values of one rank, and a try to be the one that answers for the host.

    To be made before anything else imports `prometheus_client`.

    Args:
        port: TCP port of the host, on all of its interfaces.
        root: `--sparse-ckpt-dir`, below which the files of all processes lie.
        run_id: name of the run.
        node: name of this node, real or emulated.
        rank: global rank.

    Raises:
        ConfigurationError: the library is missing, or was imported for one process alone.
        HostMemoryError: the directory is not this user's own, or its file system is full.
    """

    def __init__(self, port: int, root: Path, run_id: str, node: str, rank: int) -> None:
        self._path = root / '.metrics' / run_id
        private.make_directories(root, self._path)
        for kind in _FILE_KINDS:  # a write to a page that is not there would end the process
            reserve(self._path / f'{kind}_{os.getpid()}.db', _FILE_BYTES)
        client = _library(self._path)
        self._common = (run_id, node, str(rank))
        self._metrics = {one: _metric(client, one) for one in INSTRUMENTS}
        self._stopping = threading.Event()
        self._server: PageServer | None = None
        self._thread = threading.Thread(
            target=self._answer, args=(client, port), name='metrics-port', daemon=True
        )
        self._thread.start()

    def add(self, instrument: Instrument, amount: float, label: str | None = None) -> None:
        """Add to a counter."""
        self._of(instrument, label).inc(amount)

    def set(self, instrument: Instrument, value: float, label: str | None = None) -> None:
        """Replace the value of a gauge."""
        self._of(instrument, label).set(value)

    def close(self) -> None:
        """Stop answering and remove the files of this process, and those of dead ones."""
        self._stopping.set()
        if self._server is not None:
            self._server.stop()
        self._thread.join()
        for path, pid in _files(self._path):
            if pid == os.getpid() or not psutil.pid_exists(pid):
                path.unlink(missing_ok=True)
        for path in (self._path, self._path.parent):
            with contextlib.suppress(OSError):  # others are still there
                path.rmdir()

    def _of(self, instrument: Instrument, label: str | None) -> Any:
        own = () if instrument.label is None else (label,)
        return self._metrics[instrument].labels(*self._common, *own)

    def _answer(self, client: ModuleType, port: int) -> None:
        """Body of the thread."""
        turn = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        warned = False
        try:
            while not self._stopping.is_set():
                problem = self._serve(client, port) if _is_mine(turn) else None
                if problem is not None and not warned:
                    warned = True
                    logger.warning(_PORT_TAKEN, port, problem)
                self._stopping.wait(_TRY_AGAIN_S)
        finally:
            os.close(turn)

    def _serve(self, client: ModuleType, port: int) -> OSError | None:
        """Answer until the end; why nobody can, if so."""
        try:
            listening = listen(port)
        except OSError as error:
            return error
        shown = _AllProcesses(self._path)

        def page(accepted: str) -> tuple[str, bytes]:
            encode, kind = client.exposition.choose_encoder(accepted)
            return kind, encode(shown)

        self._server = PageServer(listening, page)
        if self._stopping.is_set():  # `close` may not have seen it
            self._server.stop()
        self._server.serve()
        return None


class _AllProcesses:
    """What the library is to show: the values of all processes, without gauges of dead ones."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def collect(self) -> Iterator[Any]:
        from prometheus_client import CollectorRegistry, multiprocess

        for pid in {pid for _, pid in _files(self._path) if not psutil.pid_exists(pid)}:
            multiprocess.mark_process_dead(pid, str(self._path))
        collector = multiprocess.MultiProcessCollector(CollectorRegistry(), str(self._path))
        return iter(collector.collect())


def _library(path: Path) -> ModuleType:
    """`prometheus_client`, which reads the variable when it is imported."""
    os.environ[_DIRECTORY] = str(path)
    try:
        values = importlib.import_module('prometheus_client.values')
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            '--sparse-ckpt-metrics needs the package prometheus_client: pip install it on all '
            'nodes, or leave the flag out.'
        ) from error
    if values.ValueClass.__name__ != 'MmapedValue':
        raise ConfigurationError(
            '--sparse-ckpt-metrics: the program has imported prometheus_client before, and that '
            f'for one process alone. Set {_DIRECTORY} before that import, or leave the flag out.'
        )
    return importlib.import_module('prometheus_client')


def _is_mine(turn: int) -> bool:
    """Whether no other process of this run has the lock, which then is ours."""
    try:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _metric(client: ModuleType, instrument: Instrument) -> Any:
    labels = ['run', 'node', 'rank', *([instrument.label] if instrument.label else [])]
    own = client.CollectorRegistry()  # the default one may have others of these names
    if instrument.kind is Kind.COUNTER:
        return client.Counter(instrument.name, instrument.help, labels, registry=own)
    return client.Gauge(
        instrument.name, instrument.help, labels, registry=own, multiprocess_mode='livemostrecent'
    )


def _files(path: Path) -> Iterator[tuple[Path, int]]:
    """The library's files and the processes that they belong to: `<kind>_<pid>.db`."""
    for file in path.glob('*.db'):
        pid = file.stem.rpartition('_')[2]
        if pid.isdecimal():
            yield file, int(pid)
