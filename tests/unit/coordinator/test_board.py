# SPDX-License-Identifier: Apache-2.0
"""Conclusions that the model reaches with many steps only, and what people are shown."""

from collections.abc import Sequence

import msgspec
import pytest

from moevement_ext.coordinator import board as boards
from moevement_ext.coordinator.board import LEFT_OUT, Board, settled
from moevement_ext.coordinator.statements import (
    AllSaid,
    Beat,
    Fenced,
    Hello,
    JobStart,
    Move,
    Promise,
    Promises,
    RoundMet,
    RoundPhase,
    RoundPlace,
    Say,
    framed,
    roster_of,
)
from moevement_ext.membership.report import Report, decode_all, encode
from moevement_ext.memory.window.name import MAX_GIVEN_UP, NOTHING_AGREED, Agreed, WindowName
from moevement_ext.recover.verdict import Localized, decide_recovery
from tests.unit.recover.test_verdict import survivor

JOB = JobStart(0, 3, '')


def hello(rank: int, place: RoundPlace, token: int = 0, born: int = 0) -> Hello:
    return Hello(rank, token or 2**rank, JOB, born, place)


def in_round(number: int, *tokens: int) -> RoundPlace:
    return RoundPlace(RoundPhase.IN, number, roster_of(tokens), been=True)


def board_of(*places: RoundPlace, decide: boards.Rule = b''.join, **rules: boards.Rule) -> Board:
    board = Board(JOB, decide, rules)
    for rank, place in enumerate(places):
        assert board.greet(hello(rank, place)) is None
    return board


def all_in(**rules: boards.Rule) -> Board:
    return board_of(*[in_round(1, 1, 2, 4)] * 3, **rules)


RETURNING = {
    'an older round': RoundPlace(RoundPhase.IN, 4, 99, been=True),
    'left an older round': RoundPlace(RoundPhase.LEFT, 4, been=True),
    'waits for the round': RoundPlace(RoundPhase.JOINED, 5, been=True),
}
MUTATIONS = {
    'an older round': ('_is_behind', lambda one, newest: False),
    'left an older round': ('_is_behind', lambda one, newest: False),
    'waits for the round': ('_left_out', lambda self, newest, here: None),
}


@pytest.mark.parametrize('place', RETURNING.values(), ids=RETURNING)
def test_a_process_that_was_left_out_ends_no_round(place: RoundPlace) -> None:
    """While its successor, with token 8, is not connected."""
    board = board_of(*[in_round(5, 1, 2, 8)] * 2)
    assert board.greet(hello(2, place)) is None
    found = board.conclude()
    assert found.stale == {2} and found.over.number == 4
    assert [*board.for_rank(2, found)] == [LEFT_OUT]


@pytest.mark.parametrize('returning', RETURNING)
def test_an_exception_for_left_out_processes_is_needed(
    returning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, mutation = MUTATIONS[returning]
    owner = Board if hasattr(Board, name) else boards
    monkeypatch.setattr(owner, name, mutation)
    with pytest.raises(AssertionError):
        test_a_process_that_was_left_out_ends_no_round(RETURNING[returning])


def test_a_new_process_ends_the_round_that_was_met_without_it() -> None:
    board = board_of(*[in_round(5, 1, 2, 8)] * 2)
    assert board.greet(hello(2, RoundPlace().joined(b''))) is None
    found = board.conclude()
    assert found.over.number == 5 and found.over.why == 'rank 2 has a new process'
    assert {rank: [*board.for_rank(rank, found)] for rank in range(3)} == dict.fromkeys(
        range(3), [found.over]
    )


@pytest.mark.parametrize(
    ('old', 'new', 'stays'),
    [
        (RoundPlace(), RoundPlace(), 'new'),
        (in_round(1, 7), RoundPlace(), 'new'),
        (RoundPlace(), in_round(1, 7), 'old'),
        (in_round(1, 7), in_round(1, 7), 'later'),
    ],
)
def test_of_two_processes_of_a_rank_one_stays(old: RoundPlace, new: RoundPlace, stays: str) -> None:
    for born in (1, 3):
        board = Board(JOB, b''.join)
        board.greet(hello(0, old, 11, 2))
        refused = board.greet(hello(0, new, 12, born))
        new_stays = stays == 'new' or (stays == 'later' and born == 3)
        assert board.members[0].token == (12 if new_stays else 11)
        assert (refused is None) == new_stays


@pytest.mark.parametrize(
    ('others', 'outcome'),
    [
        (RoundPlace(RoundPhase.JOINED, 2, been=True), 'later'),
        (in_round(2, 1, 2, 4), LEFT_OUT),
        (in_round(2, 1, 2, 8), None),
    ],
    ids=['may go on without it', 'go on without it', 'go on with it'],
)
def test_a_process_that_returns_displaces_none_that_others_go_on_with(
    others: RoundPlace, outcome: object
) -> None:
    """Rank 2 has token 4 on the board, and 8 in the process that returns, which is newer."""
    waits = RoundPlace(RoundPhase.JOINED, 2, been=True)
    board = board_of(others, others, waits)
    returns = hello(2, waits, 8, 1)
    if outcome == 'later':
        with pytest.raises(ConnectionError, match='may go on with another'):
            board.greet(returns)
    else:
        assert board.greet(returns) == outcome
    assert board.members[2].token == (8 if outcome is None else 4)


@pytest.mark.parametrize(
    'job',
    [JobStart(0, 2, ''), JobStart(0, 3, 'other'), JobStart(1, 3, '')],
    ids=['size', 'settings', 'attempt'],
)
def test_process_of_another_job_is_refused_by_name(job: JobStart) -> None:
    refused = Board(JOB, b''.join).greet(msgspec.structs.replace(hello(0, RoundPlace()), job=job))
    assert refused is not None and repr(job) in refused.why and repr(JOB) in refused.why


@pytest.mark.parametrize('rank', [-1, 3])
def test_rank_outside_of_the_job_is_refused(rank: int) -> None:
    assert isinstance(Board(JOB, b''.join).greet(hello(rank, RoundPlace(), 7)), Fenced)


def test_verdict_is_that_of_the_engine_and_is_decided_once() -> None:
    decided = []

    def decide(reports: Sequence[bytes]) -> bytes:
        found = decide_recovery(decode_all(reports), [0, 1, 2], set(), 100)
        decided.append(found)
        return msgspec.msgpack.encode(found)

    report = encode(survivor(9))
    board = board_of(*[RoundPlace().joined(report)] * 3, decide=decide)
    for _ in range(3):
        met = board.conclude().met
    assert met is not None and len(decided) == 1 and isinstance(decided[0], Localized)
    assert msgspec.msgpack.decode(met.verdict)['target'] == 9
    assert isinstance(decode_all([report])[0], Report)


def test_verdict_is_repeated_for_those_who_have_not_heard_it() -> None:
    """By a coordinator that was started after the others had."""
    board = board_of(*[RoundPlace(RoundPhase.IN, 1, 7, b'r', been=True)] * 2)
    board.greet(hello(2, RoundPlace().joined(b's')))
    found = board.conclude()
    assert [*board.for_rank(2, found)] == [RoundMet(1, 7, b'rrs')] and not [
        *board.for_rank(0, found)
    ]


def test_a_name_that_all_have_said_is_told_with_what_follows() -> None:
    board = all_in(load=lambda values: b'+'.join(values))
    about = 1, 7
    for rank in range(3):
        assert board.conclude().in_round == ()
        for name in ('load', 'ready'):
            board.hear(rank, Say(name, b'%d' % rank, about))
        board.hear(rank, Say('old', b'', (0, 0)))
        board.hear(rank, Promise((0, 0), 'memory', Promises((WindowName(1, 'a'),))))
    assert board.conclude().in_round == (
        AllSaid(about, 'load', b'0+1+2'),
        AllSaid(about, 'ready', b''),
    )
    board.hear(1, Say('load', b'5', about))
    assert board.conclude().in_round[0] == AllSaid(about, 'load', b'0+5+2')
    assert board.values('load', [0, 1, 9]) == {0: b'0', 1: b'5'}
    board.hear(2, Move(RoundPlace(RoundPhase.LEFT, 1, been=True, why='an error')))
    assert board.conclude().in_round == () and board.conclude().over.why == 'an error'
    assert board.values('load', [0, 1, 2]) == {0: b'0', 1: b'5'}


def test_facts_outlive_a_round() -> None:
    board = all_in()
    board.hear(0, Say('address', b'a', None))
    board.hear(0, Move(RoundPlace(RoundPhase.LEFT, 1, been=True)))
    assert board.values('address', range(3)) == {0: b'a'}


def test_absence_ends_a_round_after_learning_alone() -> None:
    board = all_in()
    board.gone(1)
    assert board.conclude().over.number == 0
    board.miss([0, 1])
    assert board.conclude().over.why == 'rank 1 is lost'
    board.learning = True
    assert board.conclude().over.number == 0
    board.learned()
    assert board.conclude().over.number == 1


@pytest.mark.parametrize('over', [False, True], ids=['verdict', 'end of a round'])
def test_bytes_of_a_rank_do_not_grow_with_the_job(over: bool) -> None:
    def told(size: int) -> float:
        board = Board(JobStart(0, size, ''), lambda reports: b'v' * 100)
        roster = roster_of(range(1, size + 1))
        inside = RoundPlace(RoundPhase.IN, 1, roster, been=True)
        place = inside if over else RoundPlace().joined(b'r' * 1000)
        for rank in range(size):
            board.greet(Hello(rank, rank + 1, board.job, 0, place))
        lost = range(size // 2 if over else 0)
        for rank in lost:
            board.gone(rank)
        board.miss(lost)
        found = board.conclude()
        messages = [one for rank in board.members for one in board.for_rank(rank, found)]
        assert len(messages) == size - len(lost)
        return sum(len(framed(one)) for one in messages) / len(messages)

    assert told(400) <= told(20) + 16


def tells_all_reports(self: Board, rank: int, found: boards.Conclusions) -> object:
    every = b''.join(one.place.report for one in self.members.values())
    return [RoundMet(1, 7, every)]


@pytest.mark.parametrize(
    ('over', 'owner', 'name', 'mutation'),
    [(False, Board, 'for_rank', tells_all_reports), (True, boards, '_MOST_NAMED', 10**6)],
)
def test_growing_messages_are_noticed(
    over: bool, owner: object, name: str, mutation: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutation)
    with pytest.raises(AssertionError):
        test_bytes_of_a_rank_do_not_grow_with_the_job(over)


# ---- windows

W2, W4 = WindowName(2, 'h_p'), WindowName(4, 'h_p')


@pytest.mark.parametrize(
    ('promises', 'agreed'),
    [
        ([Promises(), Promises()], NOTHING_AGREED),
        ([Promises((W2, W4)), Promises((W2,))], Agreed(W2)),
        ([Promises((W2, W4)), Promises((W2,), (4,))], Agreed(W2, (4,))),
        ([Promises((W2,)), Promises((WindowName(2, 'h_q'),))], NOTHING_AGREED),
        ([Promises((W4,)), Promises((W4,), (2,))], Agreed(W4)),
    ],
)
def test_persisted_is_what_all_promise(promises: list[Promises], agreed: Agreed) -> None:
    assert settled(promises) == agreed and settled(promises[::-1]) == agreed


def test_an_awaited_window_is_not_given_up_with_many_later_ones() -> None:
    """Not before the rank that lacks it has said so: the other one may yet complete it."""
    later = range(4, 4 + MAX_GIVEN_UP)
    skipping = Promises((W2,)).without(later, NOTHING_AGREED)
    assert not skipping.lacks(2) and skipping.lacks(1)
    agreed = settled([skipping, Promises()])
    assert agreed.given_up == tuple(later)[1:] and not agreed.is_given_up(2)
    assert settled([skipping, Promises((W2,))]).persisted == W2
    lacking = Promises().without(later, NOTHING_AGREED)
    assert lacking.with_window(W2, NOTHING_AGREED) == lacking
    assert settled([Promises((W2,)), lacking]).is_given_up(2)


def test_no_window_is_both_promised_and_given_up() -> None:
    promised = Promises().with_window(W2, NOTHING_AGREED)
    assert promised.without([2], NOTHING_AGREED) == promised
    given_up = Promises().without([2], NOTHING_AGREED)
    assert given_up.with_window(W2, NOTHING_AGREED) == given_up
    assert Promises().with_window(W2, Agreed(None, (2,))) == Promises()
    assert promised.with_window(W4, Agreed(W4)) == Promises((W4,))


# ---- for people


@pytest.mark.parametrize(
    ('beats', 'awaited'),
    [
        ([Beat(), Beat(), Beat()], {}),
        ([Beat(5, 3.0), Beat(), Beat(5, 4.0)], {1: 4.0}),
        ([Beat(5, 3.0, (1,)), Beat(5, 2.0, (2,)), Beat()], {2: 3.0}),
        ([Beat(5, 3.0, (1,)), Beat(5, 2.0, (0,)), Beat()], {}),
    ],
    ids=['none', 'any', 'over another', 'each other'],
)
def test_rank_that_others_wait_for(beats: list[Beat], awaited: dict[int, float]) -> None:
    board = all_in()
    for rank, beat in enumerate(beats):
        board.hear(rank, beat)
    assert board.awaited() == awaited


def test_the_board_is_shown_as_json() -> None:
    board = all_in()
    for rank in range(3):
        board.hear(rank, Promise((1, 7), 'memory', Promises((W2,))))
    board.hear(0, Beat(5, 3.0, (1,)))
    shown = msgspec.json.decode(msgspec.json.encode(board.shown()))
    assert shown['in_round'][0]['agreed'][0] == [2, 'h_p'] and shown['awaited'] == {'1': 3.0}
    assert [one['phase'] for one in shown['ranks']] == ['in'] * 3 and shown['missing'] == []
    board.gone(2)
    assert board.shown()['missing'] == [2]
