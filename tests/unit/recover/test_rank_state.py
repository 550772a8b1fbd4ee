# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a rank, and in whatever order: what it reports to a rendezvous is true.

A model of its memory follows every event beside the machine; all sequences of events up to a
length are tried, with a failure and a report after each.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest

from moevement_ext.membership.report import NOWHERE
from moevement_ext.recover.rank_state import (
    ForbiddenTransition,
    RankState,
    Rebuilding,
    Running,
    Torn,
    Whole,
)
from moevement_ext.recover.trainer import Start
from moevement_ext.recover.verdict import Localized

RANK = 0
LONGEST = 6


def start(iteration: int) -> Start:
    return Start(iteration, b'')


@dataclass(frozen=True)
class Memory:
    parameters: int | None
    """Iteration they belong to; None: no one iteration."""
    committed: int
    """Newest iteration that this rank or, as it was told, another one committed."""
    reached: int = 0
    """How far a replay has come."""
    recovering: bool = False
    """A verdict was reached and is not carried out; nothing is trained."""


Case = tuple[RankState, Memory]
Step = Callable[[RankState, Memory], Memory]


def verdict(target: int, *, replays: bool = False, copies: bool = False) -> Localized:
    own = frozenset({RANK} if replays else ())
    return Localized(target=target, stages=own, ranks=own, copies={RANK: 1} if copies else {})


def here(memory: Memory) -> Start:
    return start(memory.parameters if memory.parameters is not None else 0)


def stepped(rank: RankState, memory: Memory) -> Memory:
    at = memory.reached if rank.rebuilding else rank.committed
    rebuilding = rank.rebuilding
    rank.stepped(start(at + 1))
    if rebuilding:  # a catch-up computes what was committed long ago
        return replace(memory, parameters=at + 1, reached=at + 1)
    return replace(memory, parameters=at + 1, committed=at + 1)


def told(rank: RankState, memory: Memory, further: int = 0, **what: bool) -> Memory:
    """It is to replay or to copy; another rank may have committed more."""
    target = max(memory.committed, 0) + further
    rank.decided(verdict(target, **what), RANK)
    return replace(memory, parameters=None, recovering=True, committed=target)


def told_to_keep(rank: RankState, memory: Memory) -> Memory:
    rank.decided(verdict(max(rank.clean_at, 0)), RANK)  # a verdict is made of true reports
    return replace(memory, recovering=True)


def told_to_go_on(rank: RankState, memory: Memory) -> Memory:
    newer = verdict(memory.committed, replays=True)
    rank.goes_on(newer)
    assert rank.pending is newer
    return memory


def told_to_go_on_to_another_end(rank: RankState, memory: Memory) -> Memory:
    rank.goes_on(verdict(memory.committed + 1, replays=True))
    raise AssertionError('it would end before the others')


def reached(rank: RankState, memory: Memory, at: int) -> Memory:
    rank.reached(start(at))
    return replace(memory, parameters=at, reached=at)


def _leaves(act: Callable[[RankState, Memory], None], **changed: object) -> Step:
    """Nothing of the memory changes, or what is named."""

    def step(rank: RankState, memory: Memory) -> Memory:
        act(rank, memory)
        return replace(memory, **changed)  # type: ignore[arg-type]

    return step


STEPS: dict[str, Step] = {
    'begins': _leaves(lambda rank, memory: rank.begins(here(memory))),
    'updating': _leaves(lambda rank, _: rank.updating(), parameters=None),
    'stepped': stepped,
    'told to keep': told_to_keep,
    'told to replay': partial(told, replays=True),
    'told to replay further': partial(told, further=2, replays=True),
    'told to copy': partial(told, copies=True),
    'told to go on': told_to_go_on,
    'told to go on to another end': told_to_go_on_to_another_end,
    'undone': _leaves(lambda rank, _: rank.undone()),
    'end of a window': lambda rank, memory: reached(rank, memory, max(memory.committed - 2, 0)),
    'target': lambda rank, memory: reached(rank, memory, memory.committed),
    'rebuilt': _leaves(lambda rank, _: rank.rebuilt()),
    'resumed': _leaves(lambda rank, _: rank.resumed(), recovering=False),
}
STARTS: list[Case] = [
    (RankState(0, start(0)), Memory(0, 0)),
    (RankState(6, start(6)), Memory(6, 6)),
    (RankState(6), Memory(None, 6)),  # converts a window with all others
    (RankState(NOWHERE), Memory(None, NOWHERE)),  # a new process
]


def all_cases() -> Iterator[tuple[list[str], Case]]:
    """Every sequence of events that is not forbidden, with what it leads to; no state twice."""
    seen = set()
    pending: list[tuple[list[str], Case]] = [([], case) for case in STARTS]
    while pending:
        path, (rank, memory) = pending.pop()
        key = (rank.position, rank.committed, str(rank.pending), memory)
        if key in seen:
            continue
        seen.add(key)
        yield path, (rank, memory)
        if len(path) == LONGEST:
            continue
        for name, step in STEPS.items():
            following = copy.copy(rank)
            try:
                after = step(following, memory)
            except ForbiddenTransition:
                assert vars(following) == vars(rank), 'a refusal changes nothing'
                continue
            pending.append(([*path, name], (following, after)))


def check_truth(path: list[str], rank: RankState, memory: Memory) -> None:
    """If the rank met the others now, would they be right to rely on what it reports?"""
    if rank.clean_at != NOWHERE:
        assert memory.parameters == rank.clean_at, path
        assert rank.kept == start(rank.clean_at), path
    assert rank.committed == memory.committed, path
    assert (rank.pending is not None) == memory.recovering, path


def test_reports_are_true_after_any_sequence_of_events() -> None:
    """Nor is a state given away that is there: it would be replayed for nothing."""
    positions = set()
    for path, (rank, memory) in all_cases():
        check_truth(path, rank, memory)
        positions.add((type(rank.position), rank.pending is not None))
        if isinstance(rank.position, Whole | Running):
            assert rank.clean_at == memory.parameters, path
        if memory.parameters is None:
            assert isinstance(rank.position, Torn | Rebuilding), path
    kinds = (Whole, Running, Torn, Rebuilding)
    assert positions == {*product(kinds, (False, True))} - {(Torn, True)}


def test_training_skips_no_iteration() -> None:
    with pytest.raises(ForbiddenTransition, match='starts at 6'):
        RankState(5, start(6))
    rank = RankState(6, start(6))
    with pytest.raises(ForbiddenTransition, match='begins after 7'):
        rank.begins(start(7))
    rank.begins(start(6))
    rank.undone()
    rank.begins(start(6))
    with pytest.raises(ForbiddenTransition, match='stepped to 8'):
        rank.stepped(start(8))
    rank.updating()
    with pytest.raises(ForbiddenTransition, match='rolls back'):
        rank.undone()
    rank.stepped(start(7))
    rank.begins(start(7))
    rank.stepped(start(7))  # its caller refuses a loop that steps twice
    assert rank.clean_at == rank.committed == 7


def test_nothing_is_trained_before_a_recovery_is_carried_out() -> None:
    for path, (rank, _) in all_cases():
        if rank.pending is not None and not rank.rebuilding:
            with pytest.raises(ForbiddenTransition, match='begins'):
                rank.begins(start(rank.committed))
            with pytest.raises(ForbiddenTransition, match='stepped'):
                rank.stepped(start(rank.committed + 1))
            assert path


def test_a_recovery_ends_at_its_target_only() -> None:
    rank: RankState = RankState(NOWHERE)
    rank.decided(verdict(8, replays=True), RANK)
    rank.reached(start(5))
    with pytest.raises(ForbiddenTransition, match='reaches 4'):
        rank.reached(start(4))
    with pytest.raises(ForbiddenTransition, match='takes for rebuilt'):
        rank.rebuilt()
    for iteration in (6, 7, 8):
        rank.begins(start(iteration - 1))
        if iteration != 7:  # whose update was skipped
            rank.updating()
        rank.stepped(start(iteration))
        assert rank.clean_at == NOWHERE
    rank.rebuilt()
    assert (rank.clean_at, rank.kept) == (8, start(8))
    rank.resumed()


_STEPPED, _DECIDED = RankState.stepped, RankState.decided


def keeps_the_end_of_the_window(rank: RankState, state: Start) -> None:
    if not rank.rebuilding:
        _STEPPED(rank, state)


def takes_what_is_loaded_for_whole(rank: RankState, decided: Localized, own: int) -> None:
    kept = rank.kept
    _DECIDED(rank, decided, own)
    if kept is not None:
        rank.position = Whole(kept)


@pytest.mark.parametrize(
    ('method', 'mutation'),
    [
        ('decided', takes_what_is_loaded_for_whole),
        ('updating', lambda rank: None),  # as if an update could be put back
    ],
)
def test_an_untrue_report_is_noticed(
    method: str, mutation: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankState, method, mutation)
    with pytest.raises(AssertionError):
        test_reports_are_true_after_any_sequence_of_events()


def test_dropped_iteration_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RankState, 'stepped', keeps_the_end_of_the_window)
    with pytest.raises(ForbiddenTransition):
        test_a_recovery_ends_at_its_target_only()
