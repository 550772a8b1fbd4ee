# SPDX-License-Identifier: Apache-2.0
"""The board: what the processes of a job state, and what follows from it.

A process owns its statements: it alone changes them, and states all of them again on a new
connection. The board remembers nothing else. So a coordinator that was killed is replaced by an
empty one, and draws the same conclusions once the processes are connected again.

*Rounds.* Between two failures all ranks are in one round, with one process each. A round is named
by its number and its roster, a digest of the tokens of these processes. Each process joins a round
with a report, and the verdict is a function of the reports, so a name has one verdict whichever
coordinator draws it. A round whose processes change is over, and its name never returns.

    setting up -> joined(n) -> in(n) -> left(n) -> joined(n + 1), or a later one

*Windows.* A window is persisted once all ranks promise it in the same round. A promise binds the
process, not the coordinator: no promised file is overwritten before a newer window is persisted, or
a verdict goes back behind it. A new round begins without promises, so none is ever withdrawn.

*Absence.* While the board is `learning`, a process that is not connected may still exist, and
nothing follows from its absence.

No clock and no socket: `coordinator.Coordinator` says which ranks are absent.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from moevement_ext.coordinator.statements import (
    AllSaid,
    Beat,
    Conclusion,
    Fenced,
    Hello,
    JobStart,
    Move,
    Promise,
    Promises,
    RoundMet,
    RoundOver,
    RoundPhase,
    Say,
    Settled,
    roster_of,
)
from moevement_ext.memory.window.name import MAX_GIVEN_UP, NOTHING_AGREED, Agreed

type Rule = Callable[[Sequence[bytes]], bytes]
"""From the values of all ranks, by rank, to a value for all; a pure function."""

LEFT_OUT = Fenced('the other ranks have gone on with another process')
_MOST_NAMED = 4


class Conclusions(msgspec.Struct, frozen=True):
    """What follows from the statements that are present."""

    stale: frozenset[int] = frozenset()
    """Ranks whose process the others went on without."""
    over: RoundOver = RoundOver(0, '')
    met: RoundMet | None = None
    in_round: tuple[Settled | AllSaid, ...] = ()
    """For the processes in the round that has met."""


class Board:
    """Statements by rank, of at most one process each.

    Args:
        decide: the verdict of a round from all reports.
        rules: what follows once all ranks have said a name.
        leads: the ranks meet here. Otherwise they meet by themselves, and a process that is not
            here may have no way to here: it is missed only in the round that it was here in.
    """

    def __init__(
        self,
        job: JobStart,
        decide: Rule,
        rules: Mapping[str, Rule] | None = None,
        leads: bool = True,
    ) -> None:
        self.job = job
        self.members: dict[int, Hello] = {}
        self.beats: dict[int, Beat] = {}
        self.absent: frozenset[int] = frozenset()
        """Ranks without a process, for longer than a reconnection takes."""
        self.learning = True
        self._decide = decide
        self._rules = rules or {}
        self._leads = leads
        self._was_in: dict[int, int] = {}  # number of its round, when a process went
        self._decided = RoundMet(0, 0, b'')  # the last verdict, as it is expensive

    # Statements

    def greet(self, hello: Hello) -> Fenced | None:
        """Put up the statements of a process, or return why it has no place here.

        Another process of its rank has no place any more, unless the others go on with it. Raises
        `ConnectionError` while that is open, because they have not entered the round that has met.
        """
        if hello.job != self.job or not 0 <= hello.rank < self.job.size:
            return Fenced(f'rank {hello.rank} of {hello.job} does not belong to {self.job}')
        old = self.members.get(hello.rank)
        if old is not None and old.token != hello.token:
            if hello.precedence < old.precedence:
                return Fenced('another process has taken its rank')
            if hello.rank not in self._here({**self.members, hello.rank: hello})[1]:
                return LEFT_OUT
            met = self.conclude().met
            if met is not None and hello.place.been and hello.place.last < met.number:
                raise ConnectionError('the other ranks may go on with another process')
        self.members[hello.rank] = hello
        self.absent -= {hello.rank}
        if len(self.members) == self.job.size:
            self.learning = False
        return None

    def hear(self, rank: int, message: Move | Promise | Say | Beat) -> None:
        """Change a statement of the process of a rank."""
        if isinstance(message, Beat):
            self.beats[rank] = message
        else:
            self.members[rank] = self.members[rank].with_statement(message)

    def gone(self, rank: int, is_missed: bool = True) -> None:
        """Take down the statements of a process that is not connected any more."""
        one = self.members.pop(rank, None)
        self._was_in[rank] = one.place.number if one is not None and is_missed else 0
        self.beats.pop(rank, None)

    def miss(self, ranks: Collection[int]) -> None:
        """Count ranks as absent, unless they are there: they have had time to connect."""
        self.absent |= frozenset(ranks) - self.members.keys()

    def learned(self) -> None:
        """End the learning: ranks without a process now are absent."""
        self.learning = False
        self.miss(range(self.job.size))

    # Conclusions

    def conclude(self) -> Conclusions:
        """All conclusions; a pure function of the statements."""
        newest, here = self._here(self.members)
        over = self._over(newest, here)
        found = Conclusions(frozenset(self.members.keys() - here.keys()), over)
        places = {(one.place.phase, one.place.number) for one in here.values()}
        joined, inside = (RoundPhase.JOINED, over.number + 1), (RoundPhase.IN, over.number + 1)
        if len(here) < self.job.size or not places <= {joined, inside}:
            return found
        ranks = [here[rank] for rank in range(self.job.size)]
        met = self._met(over.number + 1, ranks)
        in_round = self._in_round(ranks) if places == {inside} else ()
        return msgspec.structs.replace(found, met=met, in_round=tuple(in_round))

    def _here(self, members: Mapping[int, Hello]) -> tuple[int, dict[int, Hello]]:
        """The newest round that a process is in, and the processes that the others count on."""
        newest = max((one.place.number for one in members.values() if one.round), default=0)
        here = {rank: one for rank, one in members.items() if not _is_behind(one, newest)}
        left_out = self._left_out(newest, here)
        if left_out is not None:
            del here[left_out]
        return newest, here

    def _left_out(self, newest: int, here: Mapping[int, Hello]) -> int | None:
        """The one process without which the round `newest` was met, if it has been in others.

        A new process would end the round instead. If several processes are not in the round, each
        of them may have been in the roster, and the round is over.
        """
        outside = [rank for rank, one in here.items() if not _is_in(one, newest)]
        if len(here) < self.job.size or len(outside) != 1:
            return None
        place = here[outside[0]].place
        rosters = {one.place.roster for one in here.values() if _is_in(one, newest)}
        is_waiting = place.been and (place.phase, place.number) == (RoundPhase.JOINED, newest)
        changed = rosters != {roster_of(one.token for one in here.values())}
        return outside[0] if len(rosters) == 1 and changed and is_waiting else None

    def _over(self, newest: int, here: Mapping[int, Hello]) -> RoundOver:
        """The newest round that is over; `newest` is the newest one that a process is in."""
        over = RoundOver(0, '')
        for one in here.values():
            number = one.place.number - (one.place.phase is not RoundPhase.LEFT)
            if number > over.number:
                over = RoundOver(number, one.place.why)
        if newest <= over.number:
            return over
        lost = [rank for rank in self.absent if self._leads or self._was_in.get(rank, 0) >= newest]
        if lost and not self.learning:
            return RoundOver(newest, f'{_named(lost)} is lost')
        rosters = {one.place.roster for one in here.values() if _is_in(one, newest)}
        if len(here) == self.job.size:
            rosters.add(roster_of(one.token for one in here.values()))
        if len(rosters) > 1:
            new = [rank for rank, one in here.items() if not _is_in(one, newest)]
            return RoundOver(newest, f'{_named(new)} has a new process')
        return over

    def _met(self, number: int, ranks: Sequence[Hello]) -> RoundMet:
        roster = roster_of(one.token for one in ranks)
        if (self._decided.number, self._decided.roster) != (number, roster):
            self._decided = RoundMet(
                number, roster, self._decide([one.place.report for one in ranks])
            )
        return self._decided

    def _in_round(self, ranks: Sequence[Hello]) -> Iterator[Settled | AllSaid]:
        about = ranks[0].place.number, ranks[0].place.roster
        for name in sorted({name for one in ranks for name in one.promises}):
            agreed = settled([one.promises.get(name, Promises()) for one in ranks])
            if agreed != NOTHING_AGREED:
                yield Settled(about, name, agreed)
        for name in sorted(set(ranks[0].said).intersection(*(one.said for one in ranks))):
            rule = self._rules.get(name)
            yield AllSaid(about, name, rule([one.said[name] for one in ranks]) if rule else b'')

    def for_rank(self, rank: int, found: Conclusions) -> Iterable[Conclusion]:
        """The conclusions that matter to the process of a rank."""
        place = self.members[rank].place
        if rank in found.stale:
            return [LEFT_OUT]
        if (
            place.number + (place.phase in (RoundPhase.LEFT, RoundPhase.SETTING_UP))
            <= found.over.number
        ):
            return [found.over]
        if place.phase is RoundPhase.JOINED and found.met:
            return [found.met]
        return found.in_round if place.phase is RoundPhase.IN else ()

    # What others ask

    def values(self, name: str, ranks: Collection[int]) -> dict[int, bytes]:
        """What these ranks have said under a name, if they have."""
        found = {}
        for rank in ranks:
            if one := self.members.get(rank):
                value = one.said.get(name, one.facts.get(name))
                if value is not None:
                    found[rank] = value
        return found

    def awaited(self) -> dict[int, float]:
        """Ranks that let others wait, and for how long, in seconds.

        They do not wait themselves, but are waited for, perhaps over others. Ranks that do not know
        for whom they wait are waiting for all that do not wait.
        """
        waiting = {rank: beat for rank, beat in self.beats.items() if beat.waits_s}
        going_on = self.members.keys() - waiting.keys()
        any_s = max((beat.waits_s for beat in waiting.values() if not beat.on), default=0.0)
        found = dict.fromkeys(going_on, any_s) if any_s else {}
        for rank, beat in waiting.items():
            reached, new = {rank}, [*beat.on]
            while new:
                at = new.pop()
                if at in waiting and at not in reached:
                    new += waiting[at].on
                reached.add(at)
            for other in reached - waiting.keys():
                found[other] = max(found.get(other, 0.0), beat.waits_s)
        return found

    def shown(self) -> dict[str, object]:
        """The state of the job for people, as JSON values."""
        found = self.conclude()
        ranks = [
            {
                'rank': rank,
                'phase': one.place.phase.name.lower(),
                'round': one.place.number,
                'committed': self.beats[rank].committed if rank in self.beats else None,
            }
            for rank, one in sorted(self.members.items())
        ]
        return {
            'attempt': self.job.attempt,
            'size': self.job.size,
            'learning': self.learning,
            'missing': sorted({*range(self.job.size)} - self.members.keys()),
            'over': {'round': found.over.number, 'why': found.over.why},
            'in_round': msgspec.to_builtins(found.in_round),
            'awaited': {str(rank): waited_s for rank, waited_s in self.awaited().items()},
            'ranks': ranks,
        }


def settled(promises: Sequence[Promises]) -> Agreed:
    """The newest window that all promise, and the later ones that some process lacks.

    A list of `MAX_GIVEN_UP` windows would give up all earlier ones: it is shorter while one of
    these may still be persisted.
    """
    every = {window for one in promises for window in one.windows}
    givers = [one for one in promises if one.given_up]
    open_ = {w for w in every if not any(one.lacks(w.start) for one in givers)}
    common = open_.intersection(*(one.windows for one in promises))
    agreed = Agreed(max(common, default=None)).with_given_up(
        start for one in givers for start in one.given_up
    )
    oldest = min((w.start for w in open_ if not agreed.is_persisted(w.start)), default=None)
    if oldest is not None and agreed.is_given_up(oldest):
        return Agreed(agreed.persisted, agreed.given_up[1 - MAX_GIVEN_UP :])
    return agreed


def _is_in(one: Hello, number: int) -> bool:
    return one.round is not None and one.place.number == number


def _is_behind(one: Hello, newest: int) -> bool:
    """Whether another process has met the round `newest` for the rank of this one.

    A new process may have joined a number that the job has long passed, and follows.
    """
    return one.place.been and one.place.number < newest


def _named(ranks: Collection[int]) -> str:
    shown = sorted(ranks)
    more = f' and {len(shown) - _MOST_NAMED} more' if len(shown) > _MOST_NAMED else ''
    return f'rank {", ".join(map(str, shown[:_MOST_NAMED]))}{more}'
