# SPDX-License-Identifier: Apache-2.0
"""Decides when a window is persisted: when every rank and its replica holders have it.

Each rank promises to the coordinator the windows that it and its holders have, and gives up others,
in each round anew. A window is persisted once all ranks have promised it in one round, so neither a
lost coordinator nor an old process makes it count too early; without a coordinator it only counts
later.

A rank leaves a round before it reports its windows for the next one, and enters that one once it
has taken back what the recovery takes from it. In between it states and hears nothing. So no rank
relies on a window that another one has taken back. A window that any rank gave up is given up by
all ranks, also in later rounds: they do not keep it any more.

The launcher keeps the coordinator, or the process of rank 0, and its successor another one (see
`coordinator.keeper`).
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from moevement_ext.coordinator.coordinator_client import CoordinatorClient, News
from moevement_ext.coordinator.keeper import Keeper, kept_by_launcher
from moevement_ext.coordinator.statements import (
    Hello,
    JobStart,
    Promises,
    Round,
    RoundOver,
    Settled,
    roster_of,
)
from moevement_ext.membership.mailbox import own_process
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.report import Report
from moevement_ext.memory.window.name import MAX_GIVEN_UP, NOTHING_AGREED, Agreed, WindowName
from moevement_ext.replicate.secret import CoordinatorSecrets

_Address = tuple[str, int]


class _AtStart(msgspec.Struct, frozen=True):
    process: int
    coordinator: _Address | None
    began: int
    """By the clock of this process, in nanoseconds."""
    kept_by_launcher: bool
    """On rank 0: it does not keep the coordinator itself."""


_AT_START = msgspec.msgpack.Decoder(_AtStart)


class Persistence:
    """The promises of one rank. Any thread.

    Construction is collective at the start of a job, not in a joining process. `host` is this
    rank's address; `secrets` authenticate ranks and coordinator.

    Attributes:
        coordinator: where the coordinator listens, on rank 0.
        on_over: called on the client's thread if a round is over that this rank is in, with its
            number and the reason; it may be called again.
        at_start: the processes of all ranks at the start of the job.
    """

    def __init__(self, rank: Rank, host: str, secrets: CoordinatorSecrets) -> None:
        given = kept_by_launcher(host) if rank.number == 0 else None
        keeps = rank.number == 0 and given is None
        self._keeper = Keeper(host, secrets.of_rank_0) if keeps else None
        # Its watchdog kills a process that hangs, if that does not stand still, too.
        hang_s, stuck_s = rank.config.hang_timeout, rank.config.stuck_timeout
        self.coordinator = given if self._keeper is None else self._keeper.address
        own, now = own_process(), time.time_ns()
        told = msgspec.msgpack.encode(_AtStart(own, self.coordinator, now, given is not None))
        self.at_start = [_AT_START.decode(one) for one in rank.exchange('coordinator', told)]
        # The coordinator may outlive all workers: it ignores those of an earlier start.
        job = JobStart(self.at_start[0].began, rank.world_size, '')
        silent_s = hang_s + stuck_s if stuck_s else 0.0
        self._hello = Hello(rank.number, own, job, now, silent_s=silent_s)
        by_launcher = self.at_start[0].kept_by_launcher
        self._secret = secrets.of_launcher if by_launcher else secrets.of_rank_0
        self._client: CoordinatorClient | None = None
        self.trackers: dict[str, WindowTracker] = {}
        self.on_over: Callable[[int, str], None] = lambda number, why: None
        self._address: _Address = ('', 0)
        self._round: Round | None = None
        self._over = 0  # number of the last round that was left
        self.lock = threading.Lock()
        self._telling = threading.Lock()

    def enter(
        self, number: int, ranks: Sequence[Report | _AtStart], coordinator: _Address | None = None
    ) -> None:
        """Promise again, in a round of all ranks, what this rank has not taken back.

        `coordinator` is where a new process of rank 0 keeps it.
        """
        with self.lock:
            if number < self._over:
                return  # another thread has left it
            self._address = ranks[0].coordinator or coordinator or self._address
            self._client = self._client or CoordinatorClient(
                self._address, self._secret, self._hello, self._heard
            )
            # The board counts from 1.
            self._round = number + 1, roster_of(one.process for one in ranks)
            self._client.enter(self._round, self._address)
            for tracker in self.trackers.values():
                self.state(tracker)

    def leave(self, why: str = 'another rank has left') -> None:
        """Leave the round. From now on no agreement of it is applied on this rank."""
        with self.lock:
            left, self._round = self._round, None
            if left is not None and self._client is not None:
                self._over = left[0]
                self._client.leave(self._over, why)
        with self._telling:
            pass  # one that was heard before is applied by now

    def state(self, tracker: 'WindowTracker') -> None:
        """State the present promises, unless this rank is in no round. With the lock."""
        if self._round is not None and self._client is not None:
            promises = tracker.promises
            self._client.promise(self._round, tracker.name, lambda _: promises)

    def close(self) -> None:
        for part in (self._client, self._keeper):
            if part is not None:
                part.close()

    def _heard(self, news: News) -> None:
        """Called on the client's thread."""
        if isinstance(news, RoundOver):
            left = self._round
            if left is not None and left[0] <= news.number:
                self.on_over(left[0] - 1, news.why)
            return
        assert isinstance(news, Settled)  # it leads no rounds
        tracker = self.trackers.get(news.name)
        if tracker is None:
            return  # a new process whose disk fails
        with self._telling:
            with self.lock:
                if news.round != self._round:
                    return
                tracker.agree(news.agreed)
                if news.agreed.given_up:
                    self.state(tracker)
            tracker.on_agreed(tracker.agreed)


class WindowTracker:
    """What this rank promises about its windows of one kind. Any thread; never blocks.

    Promises that are not taken back are stated again in the next round. `kept` is the number of
    persisted windows that this rank keeps; `on_agreed` is called on the client's thread.
    """

    def __init__(
        self,
        persistence: Persistence,
        name: str,
        on_agreed: Callable[[Agreed], None],
        kept: int = 1,
    ) -> None:
        self.name = name
        self.on_agreed = on_agreed
        self.promises = Promises()
        self.agreed = NOTHING_AGREED
        self._kept = kept
        self._persistence = persistence
        persistence.trackers[name] = self

    def report(self, window: WindowName) -> None:
        """Promise a window that this rank and its replica holders have."""
        if not self.agreed.is_outdated(window):
            given_up = Agreed(None, self.agreed.given_up)
            self._change(lambda: self.promises.with_window(window, given_up))

    def give_up(self, starts: Iterable[int]) -> None:
        """Give up windows with these starts, unless they are promised or persisted."""
        newest = sorted(starts)[-MAX_GIVEN_UP:]
        self._change(lambda: self.promises.without(newest, self.agreed))

    def withdraw_after(self, window: WindowName) -> None:
        """Take back promises of later windows than this one. Outside of a round."""

        def earlier() -> Promises:
            if self.agreed.is_outdated(window):
                self.agreed = Agreed(window, self.agreed.given_up)
            return self._with_only(lambda one: one.start <= window.start)

        self._change(earlier)

    def withdraw_unpersisted(self) -> None:
        """Take back promises of windows that are not persisted. Outside of a round.

        A holder of their replicas is gone: they count again once its successor has them.
        """
        self._change(lambda: self._with_only(lambda one: self.agreed.is_persisted(one.start)))

    def agree(self, agreed: Agreed) -> None:
        """Follow an agreement; what another rank has given up, this one gives up. With the lock.

        Other ranks may have gone back behind a window that was persisted.
        """
        self.agreed = agreed if agreed.persisted is not None else self.agreed.then(agreed)
        outdated = [one for one in self.promises.windows if self.agreed.is_outdated(one)]
        useless = outdated[: len(outdated) + 1 - self._kept]
        useless += [one for one in self.promises.windows if self.agreed.is_given_up(one.start)]
        kept = self._with_only(lambda one: one not in useless)
        self.promises = kept.without(agreed.given_up, self.agreed)

    def _with_only(self, wanted: Callable[[WindowName], bool]) -> Promises:
        return Promises(tuple(filter(wanted, self.promises.windows)), self.promises.given_up)

    def _change(self, change: Callable[[], Promises]) -> None:
        with self._persistence.lock:
            self.promises = change()
            self._persistence.state(self)
