# SPDX-License-Identifier: Apache-2.0
import fcntl
import itertools
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moevement_ext import events
from moevement_ext.errors import UserError
from moevement_ext.events import EventLog, Finished
from tests.unit.replicate.peers import wait_for

REPOSITORY = Path(__file__).parents[2]
LONG = 'x' * 20_000
_FIGURES = {
    'slots': [7, 8], 'training_s': 1.5, 'exposed_s': 0.25, 'copy_bytes_per_s': 9.0,
    'send_bytes_per_s': None, 'helpers_s': 0.5,
}  # fmt: skip
NAMES = (
    'dense_save_failed device_problem failure_detected finished job_described loss_logged '
    'next_tier protected protection_reduced recovered recovery_phase recovery_started replanned '
    'resharded slow_rank tokens_lost window_committed window_on_disk window_persisted '
    'worker_started'
).split()
"""Of the events of a rank, as files and programs outside the tree have them."""


def test_a_directory_that_cannot_be_written_is_named_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    with pytest.raises(
        UserError, match=r'--sparse-ckpt-events .*file/events: .*leave the flag out'
    ):
        EventLog(str(tmp_path / 'file' / 'events'), 0)


def test_short_windows_write_one_event_of_a_kind_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else windows of 50 ms would write most of a GB a day and rank, until the disk is full."""
    now = 100.0
    monkeypatch.setattr(events.time, 'monotonic', lambda: now)
    monkeypatch.setattr(events, '_WINDOWS_IN_A_ROW', 5)
    log, heard = EventLog(str(tmp_path), 0), list[events.Event]()
    log.listeners.append(heard.append)
    for start in range(200):  # of 10 s
        log.emit(events.WindowCommitted(start=start, plan='a', **_FIGURES))
        log.emit(events.WindowPersisted(start=start, plan='a'))
        now += 0.05
    log.emit(events.Finished(removed=True))
    log.close()
    assert len(heard) == 401, 'metrics count all'
    *written, last = events.decode((tmp_path / 'rank0.jsonl').read_bytes())
    assert isinstance(last, Finished)
    for kind in (events.WindowCommitted, events.WindowPersisted):
        starts = [event.start for event in written if isinstance(event, kind)]
        assert starts[:5] == [*range(5)] and 13 <= len(starts) <= 15 and starts[-1] >= 180


def test_bytes_that_are_no_text_cost_no_event_and_no_training(tmp_path: Path) -> None:
    """As in a path of another encoding, or of any in a locale that knows ASCII alone."""
    log = EventLog(str(tmp_path), 0)
    log.emit(events.FailureDetected(reason='/data/m\udcfcller is gone'))
    log.emit(events.WindowCommitted(start=4, plan='a', **_FIGURES))
    log.close()
    lost, committed = events.decode((tmp_path / 'rank0.jsonl').read_bytes())
    assert lost.reason == '/data/m?ller is gone' and committed.start == 4


EACH_KIND = Path(__file__).with_name('events.jsonl')
"""Lines as programs outside the tree read them."""


def test_lines_of_each_kind_keep_their_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events.time, 'time', lambda: 1.5)
    monkeypatch.setattr(events.os, 'getpid', lambda: 9)
    log = EventLog(str(tmp_path), 3)
    log.iteration = 7
    for event in events.decode(EACH_KIND.read_bytes()):
        assert (event.time, event.rank, event.pid, event.iteration) == (1.5, 3, 9, 7)
        log.emit(event)
    log.close()
    assert (tmp_path / 'rank3.jsonl').read_text() == EACH_KIND.read_text()


def subclasses_of(kind: type[events.Event]) -> list[type[events.Event]]:
    return [one for own in kind.__subclasses__() for one in (own, *subclasses_of(own))]


def test_every_name_has_one_kind() -> None:
    kinds = subclasses_of(events.Event)
    of_ranks = [kind.name for kind in kinds if kind.__module__ == events.__name__]
    assert sorted(of_ranks) == NAMES
    assert len({kind.name for kind in kinds}) == len(kinds)


def test_readers_skip_unknown_events_and_truncated_lines() -> None:
    lines = b'{"event":"of another version"}\n{"event":"worker_started","rank":1}\n{"event":"wor'
    assert [event.rank for event in events.decode(lines)] == [1]


def test_lines_of_concurrent_threads_are_in_order_of_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a thread is held up once it has read the clock."""
    encode, turns = events.encode, itertools.count()

    def late(*given: Any) -> bytes:
        line = encode(*given)
        time.sleep(0.01 * (next(turns) % 2))
        return line

    monkeypatch.setattr(events, 'encode', late)
    log = EventLog(str(tmp_path), 0)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: log.emit(events.ProtectionReduced(reason='any')), range(40)))
    log.close()
    found = [event.time for event in events.decode((tmp_path / 'rank0.jsonl').read_bytes())]
    assert len(found) == 40 and found == sorted(found)


_VICTIM = """
import itertools, sys
from moevement_ext import events
from moevement_ext.events import EventLog
log = EventLog(sys.argv[1], 0)
for count in itertools.count():
    log.iteration = count
    log.emit(events.ProtectionReduced(reason='x' * (count % 5000)))
    if count % 100 == 0:
        print(count, flush=True)
"""


def test_sigkill_truncates_at_most_one_line_and_the_next_attempt_appends(tmp_path: Path) -> None:
    for _ in range(2):
        victim = subprocess.Popen(
            [sys.executable, '-c', _VICTIM, str(tmp_path)], stdout=subprocess.PIPE, cwd=REPOSITORY
        )
        assert victim.stdout is not None
        with victim:
            reported = [int(victim.stdout.readline()) for _ in range(3)][-1]
            victim.kill()
    content = (tmp_path / 'rank0.jsonl').read_bytes()
    counts = [event.iteration for event in events.decode(content)]
    second = counts.index(0, 1)
    assert counts == [*range(second), *range(len(counts) - second)]
    assert min(second, len(counts) - second) > reported  # nothing that was emitted is lost


@pytest.mark.parametrize('cut_off', [b'{"time":1.5,"event":"wor', b'\0' * 9000])
def test_next_attempt_removes_a_truncated_line(cut_off: bytes, tmp_path: Path) -> None:
    """By SIGKILL, a full file system, or a machine that lost power: else no tool could read on."""
    path = tmp_path / 'rank0.jsonl'
    for attempt in range(2):
        log = EventLog(str(tmp_path), 0)
        log.iteration = attempt
        log.emit(events.ProtectionReduced(reason=LONG))
        log.close()
        path.write_bytes(path.read_bytes() + cut_off)
    assert [event.iteration for event in events.decode(path.read_bytes())] == [0, 1]
    path.write_bytes(cut_off)
    EventLog(str(tmp_path), 0).close()
    assert path.read_bytes() == b''


@pytest.mark.skipif(os.geteuid() != 0, reason='needs a second user')
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    """In a folder where all may write, it may lead to any file of this user."""
    theirs, link = tmp_path / 'valuable', tmp_path / 'rank0.jsonl'
    theirs.write_text('no line of events')
    link.symlink_to(theirs)
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with pytest.raises(UserError, match='--sparse-ckpt-events.*rank0.jsonl'):
        EventLog(str(tmp_path), 0)
    assert theirs.read_text() == 'no line of events'


@pytest.mark.parametrize('before', ['', '{"time":1.5,"event":"finished"}\n'])
def test_foreign_line_is_not_removed(tmp_path: Path, before: str) -> None:
    path = tmp_path / 'rank0.jsonl'
    path.write_text(f'{before}weights of a model, without a newline')
    path_of = re.escape(str(path))
    with pytest.raises(UserError, match=f'something else than events.*{path_of}'):
        EventLog(str(tmp_path), 0)
    assert path.read_text() == f'{before}weights of a model, without a newline'


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='no /dev/full')
def test_full_file_system_costs_events_until_it_has_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / 'rank0.jsonl'
    path.symlink_to('/dev/full')
    log = EventLog(str(tmp_path), 0)
    log.emit(events.WorkerStarted())
    log.emit(events.WorkerStarted())
    monkeypatch.setattr(events, '_PAUSE_S', 0.0)
    assert log._file is not None
    log._file._again_at = 0.0  # a minute later
    log.emit(events.WorkerStarted())
    assert caplog.text.count('events are not written') == 1
    path.unlink()
    path.write_bytes(b'{"time":1}\n{"time":2')  # the cut-off line was the last
    log.emit(events.WorkerStarted())
    first, last = path.read_bytes().splitlines()
    assert first == b'{"time":1}' and b'"worker_started"' in last


def test_file_system_that_does_not_answer_blocks_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, '_TO_WRITE_S', 0.01)
    os.mkfifo(tmp_path / 'rank0.jsonl')
    descriptor = os.open(tmp_path / 'rank0.jsonl', os.O_RDWR)
    log = EventLog(tmp_path, 0)
    assert log._file is not None and log._file._file is not None
    full = b' ' * fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)
    os.write(descriptor, full)
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(log.emit, Finished(removed=True))
        wait_for(log._in_turn.locked)
        for _ in range(3):
            log.emit(Finished(removed=True))
        assert not blocked.done()
        os.read(descriptor, len(full))
        blocked.result(60.0)
    log.emit(Finished(removed=True))
    assert os.read(descriptor, 1 << 16).count(b'"finished"') == 2
    assert caplog.text.count('does not answer') == 1
    log.close()
    os.close(descriptor)
