# SPDX-License-Identifier: Apache-2.0
"""Serves the metrics of all ranks of a host on one port for Prometheus.

Each process writes its page to a file every second. The process that holds a lock serves the pages
of all processes; after its end another process takes over. Counters of dead processes are kept, so
that a rank's counters add up over its restarts; gauges of dead processes are dropped.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moevement_ext.config import ConfigurationError
from moevement_ext.job.metrics.meter import is_disabled
from moevement_ext.memory import private
from moevement_ext.memory.holder_lock import HolderLock, StoreInUseError

logger = logging.getLogger(__name__)

_PORT_TAKEN = (
    '--sparse-ckpt-metrics %d: no client can read the metrics of this host, since another program '
    'or another run has that port: %s. The metrics are there as soon as the port is free; else '
    'give this run another port.'
)


# The port is open to every client that can reach the host, and this process trains. So descriptors,
# bytes and time per client are bounded, and clients get no threads. At the connection limit a new
# connection closes the oldest, so that Prometheus can always connect.
MOST_CONNECTIONS = 16
"""Limit of simultaneous connections; Prometheus needs one."""
_BACKLOG = 64
_MOST_REQUEST_BYTES = 8192
_REQUEST_S = 5.0
# Limit for sending a page to a slow client.
_ANSWER_S = 20.0

Page = Callable[[str], tuple[str, bytes]]
"""Maps the `Accept` header of a request to content type and content."""


async def serve(port: int, page: Page) -> asyncio.Server:
    """Answer every GET on all interfaces of this host with the page, until the server closes.

    Children drop the port (`system.forks`). Raises `OSError` if another process has it.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listening = socket.create_server(('', port), family=family, dualstack_ipv6=both)
    open_ = dict[StreamWriter, None]()  # oldest first

    async def attend(reader: StreamReader, writer: StreamWriter) -> None:
        while len(open_) >= MOST_CONNECTIONS:
            oldest = next(iter(open_))
            del open_[oldest]
            oldest.transport.abort()
        open_[writer] = None
        try:
            await _answer(reader, writer, page)
        except (OSError, EOFError, asyncio.LimitOverrunError):  # includes timeouts of slow clients
            pass
        except Exception:  # costs one scrape, not the training
            logger.exception('the metrics could not be shown')
        finally:
            open_.pop(writer, None)
            writer.transport.abort()

    return await asyncio.start_server(
        attend, sock=listening, limit=_MOST_REQUEST_BYTES, backlog=_BACKLOG
    )


async def _answer(reader: StreamReader, writer: StreamWriter, page: Page) -> None:
    async with asyncio.timeout(_REQUEST_S):
        head = await reader.readuntil(b'\r\n\r\n')
    request, *lines = head.decode('latin-1').split('\r\n')
    status, kind, content = '405 Method Not Allowed', 'text/plain', b''
    if request.split(' ')[0] == 'GET':
        fields = (line.partition(':') for line in lines)
        accepted = next((value for name, _, value in fields if name.lower() == 'accept'), '')
        status, (kind, content) = '200 OK', page(accepted.strip())
    writer.write(
        f'HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n'
        'Connection: close\r\n\r\n'.encode('latin-1')
        + content
    )
    async with asyncio.timeout(_ANSWER_S):
        await writer.drain()
        writer.close()
        await writer.wait_closed()


class Host:
    """Publishes the page of this process, and serves all pages if no other process does.

    `root` is `--sparse-ckpt-dir`, which contains the files of all processes. `reader` is the
    OpenTelemetry reader that renders the page from the values of a `Meter`.

    Raises `ConfigurationError` if the library is missing or disabled, `HostMemoryError` or
    `OSError` if the directory is not this user's own, or not usable.
    """

    def __init__(self, port: int, root: Path, run_id: str) -> None:
        self.reader, self._make_page = _prometheus()
        self._port = port
        self._path = root / '.metrics' / run_id
        private.make_directories(root, self._path)
        # A restarted container reuses its process ids.
        self._own = self._path / f'{time.time_ns()}-{os.getpid()}'
        self._pages = _Pages(self._path)
        self._life = HolderLock(self._own.with_suffix('.life'))
        self._turn: HolderLock | None = None
        self._server: asyncio.Server | None = None
        self._told = set[str]()
        self._closed = False
        self._writing = threading.Lock()

    def publish(self) -> None:
        """Replace the page of this process; a write error leaves the old page. Any thread."""
        new = self._own.with_suffix('.new')
        try:
            with self._writing:
                if not self._closed:
                    new.write_bytes(self._make_page())
                    new.replace(self._own.with_suffix('.page'))
        except OSError as error:
            self._warn('the metrics of this rank are not up to date: %s', error)

    async def answer(self) -> None:
        """Start serving, if no other process of this run serves; call this repeatedly."""
        try:
            self._turn = self._turn or HolderLock(self._path / 'turn')
            self._server = self._server or await serve(self._port, self._of_all)
        except StoreInUseError:
            pass
        except OSError as error:
            self._warn(_PORT_TAKEN, self._port, error)

    def close(self) -> None:
        """Stop serving; remove files of this process and dead ones. Serving thread's event loop."""
        with self._writing:
            self._closed = True
        if self._server is not None:
            self._server.close()
        self._life.release()
        for life in self._path.glob('*.life'):
            if not _lives(life):
                for file in map(life.with_suffix, ('.new', '.page', '.life')):
                    file.unlink(missing_ok=True)
        if self._turn is not None:
            self._turn.release()
        with contextlib.suppress(OSError):  # other processes still have files
            if [file.name for file in self._path.iterdir()] == ['turn']:
                (self._path / 'turn').unlink()
            self._path.rmdir()
            self._path.parent.rmdir()

    def _of_all(self, accepted: str) -> tuple[str, bytes]:
        from prometheus_client.exposition import choose_encoder

        encode, kind = choose_encoder(accepted)
        shown: Any = SimpleNamespace(collect=self._pages.families)
        return kind, encode(shown)

    def _warn(self, message: str, *values: object) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning(message, *values)


def _prometheus() -> tuple[Any, Callable[[], bytes]]:
    """An OpenTelemetry reader, and a function that renders its values as a page."""
    if is_disabled():
        raise ConfigurationError(
            '--sparse-ckpt-metrics: OTEL_SDK_DISABLED=true switches off the library of metrics. '
            'Unset the variable for this job, or leave the flag out.'
        )
    try:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry, generate_latest
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            '--sparse-ckpt-metrics needs the package opentelemetry-exporter-prometheus: pip '
            'install it on all nodes, or leave the flag out.'
        ) from error
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(
        disable_target_info=True, scope_info_enabled=False, registry=registry
    )
    return reader, partial(generate_latest, registry)


class _Values:
    """Samples of some pages by family, name and labels; those of counters are added up."""

    def __init__(self, other: '_Values | None' = None) -> None:
        self._families: dict[str, tuple[str, str]] = {} if other is None else {**other._families}
        self._values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float]
        self._values = {} if other is None else {**other._values}

    def add(self, family: Any) -> None:
        self._families.setdefault(family.name, (family.documentation, family.type))
        for sample in family.samples:
            key = family.name, sample.name, tuple(sorted(sample.labels.items()))
            before = self._values.get(key, 0.0) if family.type == 'counter' else 0.0
            self._values[key] = sample.value + before

    def metrics(self) -> list[Any]:
        from prometheus_client import Metric

        found = {name: Metric(name, *about) for name, about in self._families.items()}
        for (family, name, labels), value in self._values.items():
            found[family].add_sample(name, dict(labels), value)
        return list(found.values())


class _Pages:
    """Published metrics of all processes; the page of a dead process is read only once.

    A job that runs for weeks leaves hundreds of such pages.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._past = _Values()
        self._dead = set[Path]()

    def families(self) -> list[Any]:
        """Metrics of all processes, oldest first, without gauges of dead ones."""
        from prometheus_client.parser import text_string_to_metric_families

        living: list[Any] = []
        for file in sorted(self._path.glob('*.page')):
            page = self._new(file)
            if page is None:
                continue
            text, lives = page
            if lives:
                living += text_string_to_metric_families(text)
                continue
            self._dead.add(file)
            for family in text_string_to_metric_families(text):
                if family.type == 'counter':
                    self._past.add(family)
        values = _Values(self._past)
        for family in living:
            values.add(family)
        return values.metrics()

    def _new(self, file: Path) -> tuple[str, bool] | None:
        """Text of a page, and whether its process lives; None if it was counted, or is gone."""
        if file in self._dead:
            return None
        try:
            text, lives = file.read_text('utf-8'), _lives(file.with_suffix('.life'))
            # Read again: the process may have written a last page.
            return (text, True) if lives else (file.read_text('utf-8'), False)
        except FileNotFoundError:  # the process has just ended
            return None


def _lives(life: Path) -> bool:
    """True if the process of a page still holds its lock."""
    try:
        HolderLock(life).release()
    except StoreInUseError:
        return True
    return False
