# SPDX-License-Identifier: Apache-2.0
"""Each stage plans its own windows, and all ranks know of each other what a recovery needs."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import TCPStore

from moevement_ext.capture.layout import OperatorSlices, TensorSlice, operator_table
from moevement_ext.membership.rank import Place
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.plan.byte_planner import balanced
from moevement_ext.plan.replanning import Cycle, PlanParameters
from moevement_ext.plan.windows import Budgets
from moevement_ext.protect import replanner
from moevement_ext.protect.planner import Planner, _RankOperators
from moevement_ext.protect.replanner import publish, published

pytestmark = pytest.mark.timed

HELD = [
    {'embedding': 'rest', 'expert0': 'expert', 'expert1': 'expert'},
    {'embedding': 'rest', 'expert2': 'expert', 'expert3': 'expert'},
    {'layer': 'rest', 'router': 'router'},
    {'layer': 'rest', 'router': 'router'},
]
"""By rank, two of a stage. Those of the second stage hold the same state."""
BYTES = 1024
"""Of an operator in full."""
WORLD = len(HELD)
FIRST = PlanParameters(window=2)


class Gathered:
    """What ranks that are threads give each other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.given: dict[tuple[str, int], bytes] = {}


class GatheringThread:
    def __init__(self, rank: int, gathered: Gathered, joining: bool = False) -> None:
        self._rank = rank
        self._gathered = gathered
        self.joining = joining

    def __call__(self, name: str, own: bytes) -> list[bytes]:
        return self.among(name, own, range(WORLD), None)

    def among(self, name: str, own: bytes, ranks: Sequence[int], group: Any) -> list[bytes]:
        gathered, keys = self._gathered, [(name, rank) for rank in ranks]
        with gathered.changed:
            if not self.joining:
                gathered.given[name, self._rank] = own
            gathered.changed.notify_all()
            assert gathered.changed.wait_for(lambda: gathered.given.keys() >= set(keys), 20.0)
            return [gathered.given[key] for key in keys]

    def from_first(self, own: bytes, ranks: Sequence[int], group: Any) -> bytes:
        return self.among(f'from-first-{ranks[0]}', own, ranks, group)[0]


def operators(rank: int) -> SimpleNamespace:
    def tensors(name: str, part: str, nbytes: int) -> tuple[TensorSlice, ...]:
        return (TensorSlice(name, name, part, 0, nbytes, torch.zeros(nbytes, dtype=torch.uint8)),)

    return SimpleNamespace(
        kinds=HELD[rank],
        slices={
            name: OperatorSlices(tensors(name, 'master', BYTES), tensors(name, 'weight', 1))
            for name in HELD[rank]
        },
        tied=['embedding'] if 'embedding' in HELD[rank] else [],
    )


class Stages(NamedTuple):
    """Planners by rank, what they begin with, and how one joins them."""

    planners: list[Planner]
    first: list[Cycle]
    join: Callable[[int], Planner]


def stages_of_a_job() -> Stages:
    """As the start of a job makes them, all at once."""
    gathered = Gathered()

    def planner(rank: int, joining: bool = False) -> Planner:
        stage = rank // 2
        members = [2 * stage, 2 * stage + 1]
        replicas = [other for other in members if stage and other != rank]
        place = Place(stage, members, None, replicas, interleaved=False)
        exchange = GatheringThread(rank, gathered, joining)
        identity = RankIdentity('run', 'layout', rank)
        job = SimpleNamespace(number=rank, identity=identity, exchange=exchange)
        made = Planner(job, operators(rank), place)
        made.compare_windows(4)
        return made

    with ThreadPoolExecutor(WORLD) as threads:
        planners = list(threads.map(planner, range(WORLD)))
        first = list(threads.map(lambda made: made.first_plan(FIRST), planners))
    return Stages(planners, first, lambda rank: planner(rank, joining=True))


@pytest.fixture(scope='module')
def stages() -> Stages:
    return stages_of_a_job()


@pytest.fixture
def planners(stages: Stages) -> list[Planner]:
    return stages.planners


@pytest.fixture
def store() -> TCPStore:
    return TCPStore('127.0.0.1', 0, is_master=True, timeout=timedelta(seconds=120))


def plan(planner: Planner, window: int, shares: dict[str, float]) -> Cycle:
    return planner.plan(PlanParameters(version=1, window=window, shares=shares))


def copied(nbytes: int) -> Budgets:
    """So much is copied in an iteration, and nothing is sent."""
    return Budgets(nbytes, None, None)


def order(planner: Planner, shares: dict[str, float]) -> list[str]:
    """Operators as a window of many slots captures them."""
    return [name for slot in plan(planner, 5, shares).plan.slots for name in slot]


def test_all_ranks_have_stages_replicas_and_tied_operators(planners: list[Planner]) -> None:
    for planner in planners:
        assert planner.stage_of == [0, 0, 1, 1]
        assert planner.replicas == [[], [], [3], [2]]
        assert planner.tied == {0}
        assert planner.replicas is planner.replicas, 'not made for each look at it'


def test_experts_of_ranks_alternate_after_tied_operators(planners: list[Planner]) -> None:
    assert order(planners[0], {}) == ['embedding', 'expert0', 'expert2', 'expert1', 'expert3']


def test_slots_load_all_ranks_regardless_of_popularity() -> None:
    """One rank has the four experts with the fewest tokens, another the four with the most."""
    ranks = [[f'expert{number}' for number in range(first, first + 4)] for first in (0, 4)]
    members = [
        _RankOperators(
            sizes=dict.fromkeys(names, (12, 2)), kinds=dict.fromkeys(names, 'expert'),
            tied=[], always=0,
        )
        for names in ranks
    ]  # fmt: skip
    by_share = {name: float(place) for place, name in enumerate([*ranks[0], *ranks[1]])}
    for shares in ({}, by_share):
        names = Planner._ordered(members, shares)
        table = operator_table(names, [member.sizes for member in members])
        slots = balanced(table, 2).slot_bytes(table)
        assert max(map(max, slots)) == 2 * 12 + 2 * 2


def test_plans_of_all_stages_count_together_and_others_do_not(planners: list[Planner]) -> None:
    def digests(window: int, shares: dict[str, float]) -> set[str]:
        return {plan(planner, window, shares).digest for planner in (planners[0], planners[2])}

    found = [digests(2, {}), digests(3, {}), digests(2, {'expert0': 0.5})]
    assert [len(one) for one in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


SHARES = {'expert0': 0.4, 'expert1': 0.3, 'expert2': 0.2, 'expert3': 0.1}
DIGESTS = {
    1: ('4886364b0099d4ea', '31dbb586458e9a86'),
    2: ('837cfb667ae8feb1', 'eadec878c4c4ea1f'),
    3: ('85c2b5f319613c55', 'f9a5c05831269e16'),
    5: ('689c0d5a329d11b2', '18911a2f91ba0435'),
}
"""By W: in the order of the model, and by popularity."""


@pytest.mark.parametrize('window', DIGESTS)
def test_windows_of_an_earlier_version_keep_their_names(
    window: int, planners: list[Planner]
) -> None:
    found = [plan(planners[0], window, shares).digest for shares in ({}, SHARES)]
    assert tuple(found) == DIGESTS[window]


def test_stages_may_save_different_numbers_of_experts(planners: list[Planner]) -> None:
    parameters = PlanParameters(version=1, window=1, experts=1, by_stage={0: 3})
    first, second = (planners[rank].plan(parameters) for rank in (0, 2))
    assert (first.experts, second.experts) == (3, 1)
    alike = planners[0].plan(PlanParameters(version=1, window=1, experts=1))
    assert first.digest == second.digest != alike.digest


def test_a_job_begins_with_the_plan_of_the_first_rank_of_each_stage(stages: Stages) -> None:
    of_first, of_second = stages.first[::2]
    assert stages.first == [of_first, of_first, of_second, of_second]
    assert of_first == stages.planners[0].plan(FIRST)
    assert [len(one.plan.slots) for one in (of_first, of_second)] == [2, 2]


def test_the_first_rank_of_a_stage_hands_its_plan_out(stages: Stages, store: TCPStore) -> None:
    """Others need neither what all hold nor the shares of other stages."""
    announced = PlanParameters(
        version=1, origin=8, window=3, shares={'expert0': 0.4, 'expert1': 0.6}
    )
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(stages.planners[1].next_plan, 1, store.clone())
        publish(store, announced)
        made = stages.planners[0].next_plan(1, store)
        assert waiting.result() == made == stages.planners[0].plan(announced)
    assert made is not None and made.shares == announced.shares
    of_second = stages.planners[2].next_plan(1, store)
    assert of_second is not None and (of_second.shares, of_second.digest) == ({}, made.digest)
    assert stages.planners[3].next_plan(1, store.clone()) == of_second


def test_plan_that_is_not_handed_out_is_requested_again(
    stages: Stages, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of the stage has died; its replacement hands out the plan in force."""
    monkeypatch.setattr(replanner, '_LONGEST_WAIT', timedelta(seconds=0.2))
    publish(store, PlanParameters(version=1, origin=8, window=3))
    assert stages.planners[1].next_plan(1, store) is None
    made = stages.join(0).announced_plan(1, store)
    assert stages.planners[1].next_plan(1, store) == made


def test_joining_rank_computes_its_plan_alone(stages: Stages, store: TCPStore) -> None:
    publish(store, PlanParameters(version=1, origin=8, window=3, shares={'expert1': 0.5}))
    for rank in range(WORLD):
        joined = stages.join(rank)
        assert joined.first_plan(FIRST) == stages.first[rank]
        assert joined.shortest_window(copied(3 * BYTES), 4) == 1
    joined = stages.join(1)
    assert joined.announced_plan(1, store) == stages.planners[0].plan(published(store, 1))
    assert not store.check(['plan/1/0']), 'that is for the first rank of the stage to do'


def test_unneeded_plans_are_deleted(stages: Stages, store: TCPStore) -> None:
    for version in range(1, 20):
        publish(store, PlanParameters(version=version, origin=8 * version, window=2))
        stages.planners[0].next_plan(version, store)
    assert len(store.list_keys()) == 2 * replanner.VERSIONS_KEPT


def test_the_window_is_as_long_as_the_largest_stage_needs(planners: list[Planner]) -> None:
    """Rank 0 has three operators to distribute, and ranks of the other stage two."""
    for planner in planners:
        assert planner.shortest_window(copied(3 * BYTES), 4) == 1
        assert planner.shortest_window(copied(2 * BYTES + 64), 4) == 2
        assert planner.shortest_window(copied(BYTES - 1), 4) is None
