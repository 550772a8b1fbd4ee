# SPDX-License-Identifier: Apache-2.0
"""An error of a rank's own that looks like a lost peer is not recovered from for ever.

Processes are threads, as in `test_recovery.py`; the middle stage of the pipeline raises.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence

import pytest
from torch.distributed import DistBackendError, Store

from moevement_ext.faults import Phase
from moevement_ext.membership.rendezvous import RoundEnded
from moevement_ext.membership.report import Report, UnderWay
from moevement_ext.memory.window.name import Window, WindowName
from moevement_ext.recover import fruitless, localized
from moevement_ext.recover.fruitless import MOST, MOST_WITHOUT_MEMORY, Fruitless
from moevement_ext.recover.verdict import Localized, Verdict, WholeJob
from moevement_ext.regroup.process_groups import RegroupError
from tests.unit.recover.fake_groups import FakeGroups
from tests.unit.recover.fake_trainer import FakeTrainer
from tests.unit.recover.threaded_job import (
    OF_THREADS,
    Expected,
    Fault,
    Process,
    ThreadedJob,
    _present,
    train,
)

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300), *OF_THREADS]

ITERATIONS = 12
FAILS_AT = 7
FOR_EVER = 60

KINDS: dict[str, Callable[[], Exception]] = {
    'a data server that refuses': lambda: ConnectionRefusedError(111, 'data server'),
    'a size that gloo refuses': lambda: RuntimeError('[enforce fail at gloo/transport] 8 vs 4'),
    'stdout without a reader': lambda: BrokenPipeError(32, 'stdout'),
    'a call that NCCL refuses': lambda: DistBackendError('NCCL error: invalid argument'),
}


@pytest.fixture(scope='module', autouse=True)
def pauses_are_short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fruitless, '_FIRST_PAUSE_S', 0.01)
        yield


class Faulty:
    """Has the middle stage raise at the beginning of an iteration, as `when` says."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        when: Callable[[Process, int], bool],
        kind: Callable[[], Exception] = KINDS['a data server that refuses'],
        method: str = 'iterate',
        of: type = FakeTrainer,
    ) -> None:
        self.raised: list[Process] = []
        original = getattr(of, method)

        def fail(this: object, *args: object) -> object:
            process = _present()
            assert process is not None
            if process.rank == 1 and when(process, process.trainer.iteration):
                self.raised.append(process)
                assert len(self.raised) < FOR_EVER, 'it is recovered from for ever'
                raise kind()
            return original(this, *args)

        monkeypatch.setattr(of, method, fail)


def run(expected: Expected, most_errors: int = 0, schedule: Sequence[Fault] = ()) -> ThreadedJob:
    return train(ITERATIONS, schedule, expected, most_errors=most_errors)


@pytest.mark.parametrize('kind', KINDS.values(), ids=KINDS.keys())
def test_repeated_error_ends_the_rank_after_a_few_recoveries(
    kind: Callable[[], Exception], fault_free: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = Faulty(monkeypatch, lambda process, iteration: iteration == FAILS_AT, kind)
    with pytest.raises(type(kind()), match=re.escape(str(kind()))) as ended:
        run(fault_free)
    assert 'in fail\n' in ended.value.__notes__[0]
    assert len(faulty.raised) == MOST and {process.rank for process in faulty.raised} == {1}


@pytest.mark.parametrize('of', ['process', 'attempt'])
def test_replacement_or_restart_of_the_whole_job_may_succeed(
    of: str, fault_free: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    def when(process: Process, iteration: int) -> bool:
        again = not faulty.raised or process is faulty.raised[0]
        strikes = again if of == 'process' else process.job.restarts == 0
        return iteration == FAILS_AT and strikes

    faulty = Faulty(monkeypatch, when)
    job = run(fault_free, most_errors=1 if of == 'process' else 2)
    assert [rank for rank, _ in job.errors][:1] == [1]
    assert job.restarts == (0 if of == 'process' else 1)
    assert len(faulty.raised) == MOST * (1 + job.restarts)


@pytest.mark.parametrize('failures', [1, MOST_WITHOUT_MEMORY])
def test_a_gpu_without_memory_for_communicators_is_tried_once_more(
    failures: int, fault_free: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew = FakeGroups.renew
    failed: list[Process] = []

    def fail(
        groups: FakeGroups, store: Store, members: Collection[int] | None, *args: object
    ) -> None:
        process = _present()
        assert process is not None
        first = process if not failed else failed[0]
        if process.rank == 1 and members != () and process is first and len(failed) < failures:
            failed.append(process)
            raise RegroupError("could not be connected: Cuda failure 2 'out of memory'")
        renew(groups, store, members, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeGroups, 'renew', fail)
    job = run(fault_free, most_errors=1, schedule=[Fault(2, Phase.FORWARD, FAILS_AT)])
    assert len(failed) == failures
    assert [rank for rank, _ in job.errors] == [1] * (failures == MOST_WITHOUT_MEMORY)
    assert job.restarts == 0


# Between two steps


@pytest.mark.parametrize('last', [False, True])
@pytest.mark.parametrize('kind', KINDS.values(), ids=KINDS.keys())
def test_error_after_each_step_is_the_program_s_own(
    kind: Callable[[], Exception],
    last: bool,
    fault_free: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever progress follows each error; a connection of the program is told at once."""
    monkeypatch.setattr(localized, '_ANNOUNCEMENT_S', 0.1)  # no rank is lost
    begins = ITERATIONS if last else FAILS_AT
    faulty = Faulty(
        monkeypatch, lambda _, iteration: iteration >= begins, kind, 'note', ThreadedJob
    )
    with pytest.raises(type(kind()), match=re.escape(str(kind()))):
        run(fault_free)
    assert len(faulty.raised) == (1 if last or isinstance(kind(), ConnectionError) else MOST)


# The count

GO_ON = Localized(target=7)
NO_WINDOW = WholeJob('no window')


def report(
    fruitless: int = 0, own_error: bool = False, survivor: bool = True, replays: bool = False
) -> Report:
    under_way = UnderWay(Window(WindowName(3, 'plan'), 3), 7) if replays else None
    return Report(
        survivor, 'node', 1, [], fruitless=fruitless, own_error=own_error, under_way=under_way
    )


def failed(times: int, error: Exception | None = None) -> Fruitless:
    made = Fruitless()
    for _ in range(times):
        made.failed(error or RoundEnded('rank 1 left'), ended_round=error is not None)
    return made


RESET = ConnectionResetError('by a dead peer')


def test_a_death_is_no_fruitless_recovery() -> None:
    made, own = failed(MOST, RESET), failed(1, RESET)
    lost = report(survivor=False)
    assert made.met([report(MOST, own_error=True), lost], GO_ON) == GO_ON
    assert made.count == MOST - 1
    assert own.met([report(1, own_error=True), lost], NO_WINDOW) == NO_WINDOW


@pytest.mark.parametrize(
    ('count', 'found', 'other'),
    [
        (MOST, GO_ON, report(MOST)),
        (1, NO_WINDOW, report(1)),  # an error that leaves nothing
        (MOST, GO_ON, report(replays=True)),  # it leaves no round, and waits for the failing rank
    ],
)
def test_only_the_first_failing_rank_is_blamed(count: int, found: Verdict, other: Report) -> None:
    reports = [other, report(count, own_error=True)]
    waiting = failed(other.fruitless)
    assert waiting.met(reports, found) == found and waiting.count == count
    with pytest.raises(ConnectionResetError):
        failed(count, RESET).met(reports, found)


def test_unblamed_failure_restarts_the_whole_job() -> None:
    few, enough = failed(MOST - 1), failed(MOST)
    assert few.met(2 * [report(MOST - 1)], GO_ON) == GO_ON
    verdict = enough.met(2 * [report(MOST)], GO_ON)
    assert verdict == WholeJob(f'{MOST} recoveries in a row have brought nothing')


def test_progress_on_one_rank_is_progress() -> None:
    made = failed(MOST - 1)
    made.progressed()
    made.failed(RESET, ended_round=True)
    assert made.met([report(1, own_error=True), report(MOST)], GO_ON) == GO_ON
    assert made.count == 1
