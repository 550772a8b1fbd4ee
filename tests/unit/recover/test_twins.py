# SPDX-License-Identifier: Apache-2.0
"""A job whose ranks hold the same, but for what is a rank's own, loses all workers and a node.

Each has a twin and no replicas. The lost rank's windows come back from its twin with what was its
own: random numbers, and a buffer that its passes write to (see `threaded_job`).
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from moevement_ext.capture.layout import OperatorSlices, TensorSlice
from moevement_ext.faults import Phase
from moevement_ext.memory.mapped import Bytes
from moevement_ext.memory.window.slot import SlotContext, SlotHeader
from tests.distributed.mutations import whole_job as mutations
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.recover.fake_groups import FakeGroups
from tests.unit.recover.fake_trainer import FakeOperators, FakeTrainer, mixed
from tests.unit.recover.threaded_job import OF_THREADS, STAGES, WINDOW, Expected, Fault, ThreadedJob

FIRST = 2 * WINDOW + 1
ITERATIONS = FIRST + WINDOW + 1

pytestmark = [pytest.mark.timed, *OF_THREADS]


class CountingOperators(FakeOperators):
    """Operator a has a counter of this rank alone, which each pass of the model writes to."""

    def __init__(self, rank: int) -> None:
        super().__init__('abcd')
        self.counter = torch.full((8,), rank, dtype=torch.uint8)
        counter = TensorSlice('a', 'counter', 'buffer', 0, 8, self.counter, volatile=True)
        held = self.slices['a']
        self.slices['a'] = OperatorSlices((*held.full, counter), (*held.weights, counter))

    def load(self, header: SlotHeader, payload: Bytes, context: SlotContext) -> None:
        for record in header.records:
            if record.part == 'buffer':
                content = payload[record.offset : record.offset + record.nbytes].copy()
                self.counter.copy_(torch.from_numpy(content))
        records = [record for record in header.records if record.part != 'buffer']
        header.records, before = records, header.records
        super().load(header, payload, context)
        header.records = before


class Replica(FakeTrainer):
    """Its gradients are reduced with those of all others, so that all masters are the same."""

    operators: CountingOperators

    def __init__(self, rank: int, groups: FakeGroups) -> None:
        super().__init__('abcd', rank, STAGES, groups)
        self.operators = CountingOperators(rank)
        self.auxiliary_state.random = mixed('seed', rank)
        others = [other for other in range(STAGES) if other != rank]
        self.place = self.place._replace(twins=others)

    def everything(self) -> tuple[object, ...]:
        return *super().everything(), self.operators.counter.tolist()

    def iterate(self, iteration: int) -> None:
        self.operators.counter.add_(7 + self.stage)
        super().iterate(iteration)

    def _write(self, gradients: Mapping[str, bytes]) -> None:
        everyone = self.wire.gather(mixed(sorted(gradients.items())))
        super()._write({name: mixed(name, everyone) for name in gradients})


@pytest.fixture(scope='module')
def fault_free(threads_are_processes: None) -> Expected:
    with tmpfs_directory() as directory:
        job = ThreadedJob(directory, ITERATIONS, trainer=Replica)
        job.run()
    same = {tuple(job.states[rank, ITERATIONS][0].items()) for rank in range(STAGES)}  # type: ignore[index]
    assert len(same) == 1, 'all hold the same masters'
    assert len({str(job.states[rank, ITERATIONS][2:]) for rank in range(STAGES)}) == STAGES  # type: ignore[index]
    return job.states


@pytest.fixture
def lose(fault_free: Expected) -> Iterator[Callable[[int, bool], ThreadedJob]]:
    """Runs a job all of which dies, the node of a rank for good, or only the processes."""
    with tmpfs_directory() as directory:

        def run(victim: int, node_lost: bool) -> ThreadedJob:
            fault = Fault(victim, Phase.FORWARD, FIRST, all_die=True, node_lost=node_lost)
            job = Watched(directory, ITERATIONS, [fault], fault_free, trainer=Replica)
            job.run()
            return job

        yield run


class Watched(ThreadedJob):
    """Notes what was held of the lost rank when its node was gone."""

    held: frozenset[str] = frozenset()

    def _reap(self, process: object) -> None:
        super()._reap(process)  # type: ignore[arg-type]
        paths = Path(self.directory).glob('run/*/*/*/window-*.window')
        self.held |= {f'{path.parent.parent.name}/{path.parent.name}' for path in paths}


@pytest.mark.parametrize('victim', [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_lost_rank_recovers_its_own_bytes(
    victim: int, lose: Callable[[int, bool], ThreadedJob]
) -> None:
    job = lose(victim, True)
    assert job.restarts == 1 and len(job.recovered) == STAGES
    assert not any(event.differing for event in job.recovered)
    survivors = {rank for rank in range(STAGES) if rank != victim}
    owners = {int(place.split('/')[1]) for place in job.held if 'stub' not in place}
    assert owners == survivors, 'no rank holds more of the lost rank than its stub'
    assert any(place.endswith(f'stub-{victim}') for place in job.held)


def test_bytes_of_the_twin_give_another_state(
    lose: Callable[[int, bool], ThreadedJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutations.twin.TwinWindow, 'frame', mutations.twin.TwinWindow.frame)
    monkeypatch.setattr(mutations.twin.TwinWindow, 'payload', mutations.twin.TwinWindow.payload)
    mutations.part_of_the_twin()
    with pytest.raises(AssertionError, match='differing: rank'):
        lose(0, True)
