# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moevement_ext.events import EventLog

REPOSITORY = Path(__file__).parents[2]
LONG = 'x' * 20_000


def test_a_line_says_when_who_and_what(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path / 'events'), 3)
    log.iteration = 7
    log.emit('window_committed', start=4, plan='a')
    log.close()
    [line] = (tmp_path / 'events' / 'rank3.jsonl').read_text().splitlines()
    event = json.loads(line)
    assert event.pop('time') > 1e9
    assert event == {
        'event': 'window_committed',
        'rank': 3,
        'pid': os.getpid(),
        'iteration': 7,
        'start': 4,
        'plan': 'a',
    }


def test_lines_of_concurrent_threads_are_whole(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path), 0)

    def emit(thread: int) -> None:
        for count in range(200):
            log.emit('event', thread=thread, count=count, reason=LONG[: count * 100])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(emit, range(8)))
    log.close()
    events = [json.loads(line) for line in (tmp_path / 'rank0.jsonl').read_text().splitlines()]
    assert len(events) == 8 * 200
    for thread in range(8):
        assert [e['count'] for e in events if e['thread'] == thread] == [*range(200)]


_VICTIM = """
import itertools, sys
from moevement_ext.events import EventLog
log = EventLog(sys.argv[1], 0)
for count in itertools.count():
    log.emit('event', count=count, reason='x' * (count % 5000))
    if count % 100 == 0:
        print(count, flush=True)
"""


def test_sigkill_leaves_whole_lines_and_the_next_life_appends(tmp_path: Path) -> None:
    for _ in range(2):
        victim = subprocess.Popen(
            [sys.executable, '-c', _VICTIM, str(tmp_path)], stdout=subprocess.PIPE, cwd=REPOSITORY
        )
        assert victim.stdout is not None
        with victim:
            reported = [int(victim.stdout.readline()) for _ in range(3)][-1]
            victim.kill()
    content = (tmp_path / 'rank0.jsonl').read_text()
    assert content.endswith('\n')
    counts = [json.loads(line)['count'] for line in content.splitlines()]
    second = counts.index(0, 1)
    assert counts == [*range(second), *range(len(counts) - second)]
    assert min(second, len(counts) - second) > reported  # nothing that was emitted is lost


def test_without_a_directory_nothing_is_written(tmp_path: Path) -> None:
    log = EventLog(None, 0)
    log.emit('event')
    log.close()
    assert not [*tmp_path.iterdir()]


def test_nothing_is_written_after_close(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path), 0)
    log.close()
    log.emit('event')
    assert (tmp_path / 'rank0.jsonl').read_bytes() == b''


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='no /dev/full')
def test_full_file_system_ends_the_log_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / 'rank0.jsonl').symlink_to('/dev/full')
    log = EventLog(str(tmp_path), 0)
    log.emit('event')
    log.emit('event')
    assert caplog.text.count('no more events are written') == 1
