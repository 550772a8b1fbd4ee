# SPDX-License-Identifier: Apache-2.0

import os
import subprocess
from pathlib import Path

import pytest

from moevement_ext.launch.child import FdLoop
from moevement_ext.launch.output import LogTail, Relay, last_lines
from tests.support.readable import readable

pytestmark = pytest.mark.timed


def test_relay_prints_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    lines: list[str] = []
    relay = Relay(reader, '[rank 7] ', lines.append)
    os.write(writer, 'ä\nhalf'.encode() + b'\xff')
    assert relay.pump()
    assert capsys.readouterr().out == '[rank 7] ä\n'
    assert not relay.pump()  # no output, and the call does not block
    os.write(writer, b' and half\nlast')
    os.close(writer)
    relay.finish()
    os.close(reader)
    assert capsys.readouterr().out == '[rank 7] half\ufffd and half\n[rank 7] last\n'
    assert lines == ['ä', 'half\ufffd and half', 'last']


def test_tail_reads_only_new_lines(tmp_path: Path) -> None:
    path = tmp_path / 'log'
    path.write_text('of an earlier run\n')
    lines: list[str] = []
    tail = LogTail(path, lines.append)
    tail.pump()
    with path.open('a') as log:
        log.write('one\ntw')
        log.flush()
        tail.pump()
        assert lines == ['one']
        log.write('o\n')
    tail.pump()
    assert lines == ['one', 'two']


def test_tail_goes_on_once_its_file_is_readable_again(tmp_path: Path) -> None:
    path, away = tmp_path / 'log', tmp_path / 'away'
    lines: list[str] = []
    tail = LogTail(path, lines.append)
    tail.pump()
    path.write_text('one\n')
    tail.pump()
    path.rename(away)
    path.mkdir()  # opening it raises an error
    tail.pump()
    path.rmdir()
    away.rename(path)
    with path.open('a') as log:
        log.write('two\n')
    tail.pump()
    assert lines == ['one', 'two']


def test_last_lines_of_a_pipe_and_of_a_log(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    relay = Relay(reader, '', lambda line: None)
    lines = [f'line {number}' for number in range(5000)]
    os.write(writer, '\n'.join(lines).encode())
    os.close(writer)
    relay.finish()
    os.close(reader)
    assert relay.last_lines == lines[-15:]
    log = tmp_path / 'log'
    assert last_lines(log) == []
    log.write_text('\n'.join(['x' * 100_000, *lines]))
    assert last_lines(log) == lines[-15:]


@pytest.mark.timeout(60)
def test_relay_finishes_while_children_of_the_worker_still_print() -> None:
    reader, writer = os.pipe()
    relay = Relay(reader, '', lambda line: None)
    with subprocess.Popen(['yes'], stdout=writer, start_new_session=True) as endless:
        os.close(writer)
        assert readable(reader, 120.0)
        relay.finish()
        assert relay.last_lines[-1] == 'y'
        endless.kill()
    os.close(reader)


def test_endless_line_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    relay = Relay(reader, '', lambda line: None)
    printed = 0
    for step in range(20):
        printed += os.write(writer, b'\r' + b'%9d' % step * 1000)
        relay.pump()
    said = capsys.readouterr().out
    assert printed - len(said) < 100_000
    assert said.startswith('\r        0')
    os.close(writer)
    relay.finish()
    os.close(reader)
    assert len(said + capsys.readouterr().out) >= printed


def test_descriptor_closed_in_the_same_turn_gets_no_call() -> None:
    """The first of two callbacks closes the other's file and opens another with its number."""
    loop = FdLoop()
    ends = [os.pipe(), os.pipe()]
    calls: list[str] = []

    def call(index: int) -> None:
        calls.append('first')
        other = ends[1 - index][0]
        loop.forget(other)
        loop.watch(other, lambda: calls.append('reused'))

    for index, (reader, writer) in enumerate(ends):
        os.write(writer, b'.')
        loop.watch(reader, lambda index=index: call(index))
    loop.turn(0)
    assert calls == ['first']
    for end in sum(ends, ()):
        os.close(end)
    loop.close()
