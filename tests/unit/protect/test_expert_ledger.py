# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with some experts as of the one before: bytes, versions, tokens."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch

from moevement_ext.config import DYNAMIC
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.slot import (
    ExpertCopies,
    ExpertCopy,
    SlotContext,
    SlotHeader,
    decode_context,
)
from moevement_ext.plan.byte_planner import WindowPlan
from moevement_ext.plan.replanning import Cycle, WindowLoad
from moevement_ext.plan.strategy.moc import Moc
from moevement_ext.plan.strategy.moetion import Moetion
from moevement_ext.protect.expert_ledger import ExpertLedger
from tests.unit.memory.samples import PLAN, tmpfs_directory
from tests.unit.protect.training import NAMES, Training, verified

EXPERTS = NAMES[:2]
SIZES = dict.fromkeys(EXPERTS, 2 * 448)
"""Master and moment of 100 elements, aligned."""
INTERVAL = 2
LAST = 20
CYCLE = Cycle(origin=0, plan=WindowPlan((NAMES,)), digest=PLAN, idle=INTERVAL - 1, experts=1)

pytestmark = pytest.mark.timed


class Tokens:
    """Counts what `route` is told, while it counts."""

    soft = False

    def __init__(self) -> None:
        self.counting = False
        self.owed: dict[str, float] = {}
        self._counts = dict.fromkeys(EXPERTS, 0.0)

    def route(self, iteration: int) -> None:
        """Tokens of the iteration after `iteration`, other ones for each expert."""
        if self.counting:
            for name, count in routed_in(iteration).items():
                self._counts[name] += count

    def take(self) -> dict[str, float]:
        counts, self._counts = self._counts, dict.fromkeys(EXPERTS, 0.0)
        return counts

    def make_up(self, tokens: Mapping[str, float]) -> None:
        self.owed = dict(tokens)

    def take_capacity(self) -> None:
        return None


def routed_in(iteration: int) -> Counter[str]:
    return Counter({'expert0': 3 + iteration, 'expert1': 50})


def routed_by(iteration: int, since: int = 0) -> Counter[str]:
    return sum((routed_in(past) for past in range(since, iteration)), Counter())


class Lossy:
    """A rank that trains with `Moc`, an iteration at a time."""

    def __init__(self, shm: Path, experts: int) -> None:
        self.tokens = Tokens()
        self.ledger = ExpertLedger(self.tokens, Moc(INTERVAL, experts), SIZES)
        cycle = msgspec.structs.replace(CYCLE, experts=experts)
        self.training = Training(shm, cycle, experts=self.ledger)

    def run_until(self, iteration: int) -> None:
        training = self.training
        while training.iteration < iteration:
            at = training.iteration
            self.ledger.begins()
            self.tokens.route(at)
            training.run_until(at + 1)
            self.ledger.ends()

    def starts(self) -> list[int]:
        return [name.start for name in self.training.heard]

    def newest(self) -> tuple[SlotHeader, ExpertCopies, dict[tuple[str, str], float]]:
        """The newest window: its header, what it says, and the value of each tensor in it."""
        name = self.training.heard[-1]
        file, (header,) = verified(self.training, name.start, name.plan)
        payload = torch.from_numpy(file.payload(0).copy())
        values = {}
        for record in header.records:
            stored = payload[record.offset : record.offset + record.nbytes]
            (value,) = set(stored.view(getattr(torch, record.dtype)).tolist())
            values[record.operator, record.part] = value
        copies = decode_context(header.context).copies
        assert copies is not None
        return header, copies, values


@pytest.fixture
def lossy() -> Iterator[Callable[[int], Lossy]]:
    made: list[Lossy] = []

    def make(experts: int) -> Lossy:
        directory = shm / f'{len(made)}'
        directory.mkdir()
        made.append(Lossy(directory, experts))
        return made[-1]

    with tmpfs_directory() as shm:
        yield make
        for one in made:
            one.training.stop()


def header_of(copies: ExpertCopies) -> SlotHeader:
    """Header of the window at iteration 2 that says so."""
    context = msgspec.msgpack.encode(SlotContext([], [], b'', copies))
    return SlotHeader(1, 'run', 'topology', 0, 2, 1, 0, 2, PLAN, 0, [], context)


def versions(copies: ExpertCopies) -> dict[str, int]:
    return {name: copy.version for name, copy in copies.experts.items()}


def test_only_new_copies_are_copied_from_the_state(lossy: Callable[[int], Lossy]) -> None:
    some, every = lossy(1), lossy(2)
    bytes_of, kept = [], []
    for job in (some, every):
        job.run_until(5)
        bytes_of.append(job.training.checkpointer.statistics.slot_bytes)
        file = job.training.windows.file(job.training.heard[-1])
        assert file is not None
        kept.append(0 if file.kept is None else sum(count for *_, count in file.kept.ranges))
        job.training.stop()
    one_expert = SIZES['expert0']
    assert bytes_of[1] - bytes_of[0] == one_expert
    assert kept == [one_expert, 0], 'which holders are not sent'


def test_windows_keep_the_number_of_experts_that_a_job_has_reached(
    lossy: Callable[[int], Lossy],
) -> None:
    """A restart of all workers begins with fewer, and may be restarted again before it has more."""
    job = lossy(1)
    ledger = job.ledger
    for cycle in (msgspec.structs.replace(CYCLE, experts=2, lost=0.04), CYCLE):
        copies = ledger.checkpoint(cycle, 2, None, None).copies
        assert (copies.most, copies.lost_before) == (2, 0.04)
        ledger = ExpertLedger(job.tokens, Moc(INTERVAL, DYNAMIC), SIZES)
        ledger.go_back(header_of(copies), LAST)
        assert ledger.load(
            WindowLoad(start=0, tokens={}, iteration_s=1.0, copy_bytes_per_s=None), LAST, True, 2
        ).restored == (2, 0.04)


def test_context_has_room_for_the_experts(lossy: Callable[[int], Lossy]) -> None:
    ledger, big = lossy(1).ledger, 1 << 31
    experts = {name: ExpertCopy(big, 1.5, 2.5) for name in EXPERTS}
    copies = ExpertCopies(experts, big, 0.5, big, 0.5)
    parts = [len(msgspec.msgpack.encode(SlotContext([], [], b'', held))) for held in (copies, None)]
    assert parts[0] - parts[1] <= ledger.context_bytes


def test_a_base_that_is_damaged_is_not_passed_on(lossy: Callable[[int], Lossy]) -> None:
    """Its bytes would get a right checksum in the next window."""
    job = lossy(1)
    job.run_until(4)
    file = job.training.windows.file(job.training.heard[-1])
    assert file is not None
    file.payload(0)[:] ^= 1
    job.run_until(6)
    assert job.starts() == [0, 2]
    assert job.training.checkpointer.statistics.failures == 1


def test_names_distinguish_bases_and_histories(lossy: Callable[[int], Lossy]) -> None:
    job = lossy(1)
    job.run_until(1)
    (base,) = job.training.heard
    file = job.training.windows.file(base)
    assert file is not None
    without = job.ledger.checkpoint(CYCLE, 2, None, None)
    upon = job.ledger.checkpoint(CYCLE, 2, base, file)
    job.ledger.go_back(file.header(0), LAST)
    restored = job.ledger.checkpoint(CYCLE, 2, base, file)
    assert len({without.digest, upon.digest, restored.digest}) == 3
    assert job.ledger.base(None) == job.ledger.base(base) == base
    newer = WindowName(4, PLAN)
    assert job.ledger.base(newer) == newer
    with pytest.raises(ValueError, match=f'{base}, which has the experts .* is gone'):
        job.ledger.checkpoint(CYCLE, 2, base, None)


def test_ranks_choose_the_same_experts_regardless_of_their_counts(
    lossy: Callable[[int], Lossy],
) -> None:
    """Data-parallel ranks have the same experts, and other tokens: a copy has one version."""
    job = lossy(1)
    job.run_until(1)
    (base,) = job.training.heard
    file = job.training.windows.file(base)
    cycle = msgspec.structs.replace(CYCLE, shares={'expert0': 0.2, 'expert1': 0.8})
    taken = []
    for count in (1, 1000):
        tokens = Tokens()
        ledger = ExpertLedger(tokens, Moetion(None), SIZES)
        for iteration in range(count):
            ledger.begins()
            tokens.route(iteration)
            ledger.ends()
        taken.append(ledger.checkpoint(cycle, 2, base, file))
    one, other = taken
    assert one.digest == other.digest and one.older == other.older == {'expert0'}


def test_load_has_the_figures_that_a_strategy_needs(lossy: Callable[[int], Lossy]) -> None:
    job = lossy(1)
    job.run_until(4)
    job.ledger.load(
        WindowLoad(start=0, tokens={}, iteration_s=1.0, copy_bytes_per_s=None), LAST, True, 2
    )
    job.run_until(8)
    found = job.ledger.load(
        WindowLoad(start=4, tokens={}, iteration_s=1.0, copy_bytes_per_s=None), LAST, True, 2
    )
    assert found.tokens == routed_by(8, since=4)
    assert found.expected == sum(routed_by(8).values()) / 8 * LAST
    assert (found.lost, found.experts, found.stage_experts, found.holders) == (0, 2, 2, 2)
    assert found.expert_bytes == sum(SIZES.values())


def test_moetion_compensates_for_lost_tokens(lossy: Callable[[int], Lossy]) -> None:
    job = lossy(1)
    job.run_until(8)
    header, _, _ = job.newest()
    job.ledger.go_back(header, LAST)
    assert job.tokens.owed == {}
    ledger = ExpertLedger(job.tokens, Moetion(None), SIZES)
    ledger.go_back(header, LAST)
    assert job.tokens.owed == {'expert0': (routed_by(6) - routed_by(4))['expert0'], 'expert1': 0}
