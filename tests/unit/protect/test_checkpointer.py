# SPDX-License-Identifier: Apache-2.0
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.slot import decode_context
from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.plan.replanning import Cycle
from tests.unit.memory.samples import PLAN, digest
from tests.unit.protect.training import DEADLINE_S, NAMES, Training, W, assert_contents, verified

pytestmark = pytest.mark.timed


@pytest.fixture
def training(shm: Path) -> Iterator[Training]:
    training = Training(shm)
    yield training
    training.stop()


def test_a_window_is_committed_every_w_iterations(training: Training) -> None:
    training.run_until(4 * W)
    assert training.heard == [WindowName(start, PLAN) for start in (0, 3, 6, 9)]
    assert training.committed() == [6, 9]
    for start in training.committed():
        assert_contents(training, start)
    statistics = training.checkpointer.statistics
    assert (statistics.persisted, statistics.iterations) == (9, 12)
    assert statistics.failures == statistics.skipped_windows == 0


def test_another_plan_takes_over_at_its_origin(training: Training) -> None:
    """The window that it cuts short is given up, and its file is used again."""
    other = Cycle(origin=7, plan=WindowPlan((('router',), ('expert1', 'expert0'))), digest='plan2')
    training.run_until(4)
    training.checkpointer.schedule_next(other)
    training.run_until(7)
    assert training.checkpointer.schedule.digest == PLAN
    training.run_until(7 + 2 * 4)
    assert training.heard[-4:] == [WindowName(start, 'plan2') for start in (7, 9, 11, 13)]
    assert WindowName(6, PLAN) not in training.heard
    _, headers = verified(training, 13, 'plan2')
    assert [decode_context(header.context).full for header in headers] == [
        ['router'],
        ['expert1', 'expert0'],
    ]


def test_full_store_skips_a_window_and_delays_training_no_longer_than_allowed(
    shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(shm, max_wait_s=0.3)
    training.persisting = False  # as when another rank does not keep up
    training.run_until(2 * W)
    began = time.perf_counter()
    training.run_until(3 * W)
    assert 0.3 <= time.perf_counter() - began < DEADLINE_S
    assert training.committed() == [0, 3]
    assert training.checkpointer.statistics.skipped_windows == 1
    assert 'window 6 is skipped' in caplog.text
    assert training.agreed.given_up == (6,), 'ranks that have it are told'
    training.agree(WindowName(3, PLAN))
    training.run_until(4 * W)
    assert training.committed() == [3, 9]
    assert_contents(training, 9)
    training.stop()


def test_no_file_is_waited_for_once_a_rank_is_lost(shm: Path) -> None:
    """Nothing is persisted before that is recovered from, which waits for this rank."""
    training = Training(shm, max_wait_s=threading.TIMEOUT_MAX)
    training.persisting = False
    training.run_until(2 * W)
    lost = threading.Event()
    training.lifecycle.in_vain = lost.is_set
    losing = threading.Timer(0.1, lost.set)
    losing.start()
    training.run_until(3 * W)
    assert training.committed() == [0, 3]
    losing.join()
    training.stop()


def test_a_failed_capture_drops_only_its_window(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    training.fail_copy_of(2 * W + 1)
    training.run_until(3 * W)
    assert training.agreed.given_up == (2 * W,), 'else its parts block files of other ranks'
    training.run_until(4 * W)
    assert training.committed() == [3, 9], 'the file of the dropped window was reused'
    assert training.agreed.given_up == (), 'forgotten, as a later one is persisted'
    assert training.checkpointer.statistics.failures == 1
    assert 'protection is reduced' in caplog.text
    assert_contents(training, 3)
    assert_contents(training, 9)


def test_persisted_window_is_immutable_until_its_successor_is_persisted(shm: Path) -> None:
    training = Training(shm, max_wait_s=0)
    training.run_until(W)
    [persisted] = training.windows.committed()
    before = digest(persisted.path)
    training.persisting = False
    for iteration in range(W + 1, 4 * W):
        training.run_until(iteration)
        assert digest(persisted.path) == before
    training.stop()


def test_removed_files_are_replaced_and_windows_kept_again(training: Training) -> None:
    """As a cleaner of temporary files does, in the middle of a window."""
    training.run_until(2 * W + 1)
    shutil.rmtree(training.store.path)
    training.run_until(6 * W)
    assert [found.name.start for found in training.store.scan()] == [5 * W, 4 * W]
    mapped = Path('/proc/self/maps').read_text().splitlines()
    kept = [line for line in mapped if str(training.store.path) in line and 'deleted' in line]
    assert not kept, 'their pages would not be free'


# Failures of other ranks


def test_an_iteration_that_begins_again_is_captured_once(training: Training) -> None:
    """Others failed in iterations 2 and 4, which left nothing but junk in this rank's buffers."""
    for broken in (1, W):
        training.run_until(broken)
        training.checkpointer.begin(broken, b'state %d' % broken)
        training.buffer.fill_(-7)
        training.checkpointer.begin(broken, b'state after the failure')
        training.checkpointer.before_update()
    training.run_until(2 * W)
    assert training.committed() == [0, 3]
    for start in training.committed():
        assert_contents(training, start)
    assert training.checkpointer.statistics.failures == 0


def roll_back(training: Training, start: int) -> None:
    """Continue from window `start`, as a stage does that has to replay: its dense state is next."""
    training.checkpointer.stop_capturing()
    training.lifecycle.go_back_to(WindowName(start, PLAN))
    training.checkpointer.roll_back(start)
    training.iteration = start + W - 1
    for tensor in (*training.updated, training.buffer):
        tensor.fill_(training.iteration)


def test_after_a_rollback_later_windows_are_captured_again(shm: Path) -> None:
    training = Training(shm, max_wait_s=0)
    training.run_until(W)
    before = digest(training.windows.committed()[0].path)
    training.persisting = False  # window 3 is committed here, but another rank has not got it
    training.run_until(2 * W + 2)
    del training.heard[1:]
    roll_back(training, 0)
    assert training.committed() == [0]
    training.run_until(2 * W)
    assert training.committed() == [0, 3]
    assert training.heard == [WindowName(0, PLAN), WindowName(3, PLAN)]
    assert_contents(training, 3)
    assert digest(training.windows.committed()[-1].path) == before, 'what it was recovered from'
    training.stop()


def test_recovered_window_is_not_recaptured_by_another_plan(shm: Path) -> None:
    """Only the first window of a start counts, so the file of the second would be lost for ever."""
    plan = WindowPlan((NAMES,))
    before = Training(shm, Cycle(origin=0, plan=plan, digest='plan1'))
    before.run_until(3)
    before.stop()
    after = Training(shm, Cycle(origin=2, plan=plan, digest='plan2'), max_wait_s=0)
    after.iteration = 2
    after.heard.extend(window.name for window in after.windows.committed())
    after.lifecycle.go_back_to(WindowName(2, 'plan1'))
    try:
        after.run_until(5)
        assert WindowName(2, 'plan2') not in after.heard
        assert after.heard[-2:] == [WindowName(3, 'plan2'), WindowName(4, 'plan2')]
        assert after.checkpointer.statistics.skipped_windows == 0
    finally:
        after.stop()


def test_captures_under_way_arrive_before_older_state_is_loaded(training: Training) -> None:
    training.run_until(W)
    gate, order = threading.Event(), list[str]()
    training.checkpointer.copier._copying.submit(gate.wait, DEADLINE_S)
    training.checkpointer.begin(W, b'state %d' % W)

    def open_gate() -> None:
        order.append('arrive')
        gate.set()

    opening = threading.Timer(0.1, open_gate)
    opening.start()
    training.checkpointer.stop_capturing()
    order.append('load')
    opening.join()
    assert order == ['arrive', 'load']


def test_a_window_of_which_only_seals_are_missing_is_kept(training: Training) -> None:
    training.run_until(W - 1)
    gate = threading.Event()
    training.checkpointer.copier._sealing.submit(gate.wait, DEADLINE_S)
    training.step()
    opening = threading.Timer(0.1, gate.set)
    opening.start()
    training.checkpointer.stop_capturing()
    opening.join()
    assert training.committed() == [0]
    assert_contents(training, 0)
    assert training.checkpointer.statistics.failures == 0
