# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

import pytest

from moevement_ext.local_cluster.output import LogTail, Relay, last_lines


def test_relay_prints_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    lines: list[str] = []
    relay = Relay(reader, '[rank 7] ', lines.append)
    os.write(writer, 'ä\nhalf'.encode() + b'\xff')
    assert relay.pump()
    assert capsys.readouterr().out == '[rank 7] ä\n'
    assert not relay.pump()  # nothing there, and no waiting
    os.write(writer, b' and half\nlast')
    os.close(writer)
    relay.finish()
    os.close(reader)
    assert capsys.readouterr().out == '[rank 7] half\ufffd and half\n[rank 7] last\n'
    assert lines == ['ä', 'half\ufffd and half', 'last']


def test_tail_gives_only_what_is_new(tmp_path: Path) -> None:
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


def test_tail_waits_for_its_file(tmp_path: Path) -> None:
    lines: list[str] = []
    tail = LogTail(tmp_path / 'log', lines.append)
    tail.pump()
    (tmp_path / 'log').write_text('one\n')
    tail.pump()
    assert lines == ['one']


def test_last_lines_of_pipe_and_log(tmp_path: Path) -> None:
    """Of a log that is long, only its end is read."""
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
