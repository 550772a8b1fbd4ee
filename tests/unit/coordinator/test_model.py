# SPDX-License-Identifier: Apache-2.0
"""Invariants of a job on the board, in every order of events, and that each of them can be broken.

Explored without a bound on the steps: the limits are those of `Limits`.

C1  A round, by its name, has one verdict.
C2  A round whose processes have changed is over, and its name never returns.
C3  Once a window is persisted, some window is whole on all ranks.
C4  No window is given up and persisted.
C5  Nothing follows from absence while the coordinator is learning: its end costs no iteration.
C6  A process that the others went on without counts for nothing, and the other one stays.
C7  After the last fault all ranks get to the same round and to the end.
"""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.coordinator import board as boards
from moevement_ext.coordinator.board import Board
from moevement_ext.coordinator.statements import Hello, Promises, RoundOver, RoundPhase, RoundPlace
from moevement_ext.memory.window.name import Agreed
from tests.unit.coordinator.model import Limits, Model, report, token_of

SMALL = [
    Limits(restarts=1),
    Limits(windows=1, breaks=1),
    Limits(windows=1, deaths=1),
    Limits(skips=1),
]
LARGE = [
    Limits(windows=2, breaks=1),
    Limits(windows=0, cut_off=1),
    Limits(windows=0, breaks=1, cut_off=1),
    Limits(windows=2, deaths=1),
    Limits(windows=1, deaths=1, restarts=1),
    Limits(windows=1, deaths=1, refused=1),
    Limits(windows=2, breaks=1, restarts=1),
    Limits(windows=1, breaks=1, restarts=1, learns=True),
    Limits(skips=2, windows=4),
    Limits(ranks=3, windows=1, restarts=1),
]


@pytest.mark.parametrize('limits', SMALL, ids=str)
def test_invariants_hold_in_every_order(limits: Limits) -> None:
    states, wrong = Model(limits).explored(40_000)
    assert not wrong and states > 500


@pytest.mark.thorough
@pytest.mark.parametrize('limits', LARGE, ids=str)
def test_invariants_hold_in_every_order_of_more_faults(limits: Limits) -> None:
    states, wrong = Model(limits).explored(700_000)
    assert not wrong and states > 5000


@given(
    st.builds(
        Limits,
        ranks=st.integers(2, 4),
        windows=st.integers(2, 6),
        deaths=st.integers(0, 3),
        restarts=st.integers(0, 3),
        breaks=st.integers(0, 3),
        cut_off=st.integers(0, 1),
        skips=st.integers(0, 3),
        refused=st.integers(0, 1),
    ),
    st.integers(0, 2**32).map(Random),
)
def test_invariants_hold_in_long_jobs(limits: Limits, random: Random) -> None:
    """With more ranks and faults than can be explored, to the end of the job."""
    model = Model(limits)
    state = model.start()
    while steps := list(model.steps(state)):
        _, state = steps[random.randrange(len(steps))]
        assert not model.wrong(state)
    assert not model.stuck(state)


# ---- each invariant is needed


def forgets_its_report(self: RoundPlace, number: int, roster: int) -> RoundPlace | None:
    place = MET(self, number, roster)
    return place and boards.msgspec.structs.replace(place, report=report(()))


def counts_promises_of_any(promises: list[Promises]) -> Agreed:
    every = {window for one in promises for window in one.windows}
    return Agreed(max(every, default=None))


def gives_up_what_it_promised(self: Promises, starts: list[int], agreed: Agreed) -> Promises:
    return Promises(self.windows, agreed.with_given_up((*self.given_up, *starts)).given_up)


def keeps_promises(self: Hello, message: object) -> Hello:
    after = STATEMENT(self, message)  # type: ignore[arg-type]
    return boards.msgspec.structs.replace(after, promises={**self.promises, **after.promises})


def concludes_while_learning(self: Board) -> boards.Conclusions:
    self.learning = False
    return CONCLUDE(self)


def tells_only_those_in_a_round(self: Board, rank: int, found: boards.Conclusions) -> object:
    is_in = self.members[rank].place.phase is RoundPhase.IN
    told = FOR_RANK(self, rank, found)
    return [one for one in told if is_in or not isinstance(one, RoundOver)]


STATEMENT, CONCLUDE, FOR_RANK = Hello.with_statement, Board.conclude, Board.for_rank
MET = RoundPlace.met
DEATH, BROKEN = Limits(windows=1, deaths=1), Limits(windows=2, breaks=1, refused=1)
CUT_OFF = Limits(windows=0, cut_off=1)

MUTATIONS = [
    ('C1', RoundPlace, 'met', forgets_its_report, BROKEN),
    ('C2', boards, 'roster_of', lambda tokens: 0, DEATH),
    ('C3', boards, 'settled', counts_promises_of_any, Limits()),
    ('C3', Model, '_may_overwrite', lambda self, window, persisted: True, Limits()),
    ('C3', Hello, 'with_statement', keeps_promises, BROKEN),
    ('C4', Promises, 'without', gives_up_what_it_promised, Limits(skips=1)),
    ('C5', Board, 'conclude', concludes_while_learning, Limits(windows=1, restarts=1)),
    ('C6', Hello, 'precedence', 0, CUT_OFF),
    ('C7', Board, 'for_rank', tells_only_those_in_a_round, DEATH),
]


@pytest.mark.parametrize(('invariant', 'owner', 'name', 'mutation', 'limits'), MUTATIONS)
def test_a_mutation_is_noticed(
    invariant: str,
    owner: object,
    name: str,
    mutation: Callable,
    limits: Limits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, mutation)
    _, wrong = Model(limits).explored(40_000)
    assert wrong.startswith(invariant)


def test_a_process_with_the_token_of_its_predecessor_is_noticed() -> None:
    model = Model(DEATH, token=lambda identity: token_of(identity % DEATH.ranks))
    assert model.explored(40_000)[1].startswith('C2')
