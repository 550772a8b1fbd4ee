# SPDX-License-Identifier: Apache-2.0
"""Keeps the replicas of one owner up to date, in the background (paper sec. 3.3).

The replicator never delays or fails training.
"""

import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import InitVar, dataclass
from functools import partial

from moevement_ext.logger import logger_of
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import Agreed, WindowName
from moevement_ext.memory.window.refusal import OtherBytes
from moevement_ext.plan.windows import spread
from moevement_ext.rates import CpuCost, TokenBucket
from moevement_ext.replicate.client import CHUNK_BYTES, ReplicaClient
from moevement_ext.replicate.protocol import MIN_BYTES_PER_SECOND

logger = logger_of(__name__)

_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 30.0
_BASE_RETRY_S = 0.02
# Windows for the measured rate: enough to average, and few enough to follow the link.
_WINDOWS_MEASURED = 2


class _Peer:
    """One peer, and the slots that it is known to have."""

    def __init__(self, client: ReplicaClient, discard_after: int | None = None) -> None:
        self.client = client
        self.sent: set[tuple[WindowName, int]] = set()
        self.committed: set[WindowName] = set()
        self.discard_after = discard_after
        self.failures = 0
        self.retry_at = 0.0

    def backoff(self) -> float:
        """Count a failure; the result is the seconds until the next attempt."""
        delay = min(_FIRST_RETRY_S * 2.0**self.failures, _LAST_RETRY_S)
        self.failures = min(self.failures + 1, 16)
        self.retry_at = time.monotonic() + delay
        return delay


class _Job:
    """One window in transfer to the peers."""

    def __init__(self, file: WindowFile, name: WindowName, length: int) -> None:
        self.file = file
        self.name = name
        self.length = length
        self.urgent = False
        self.slots: list[int] = []
        self.came: list[float] = []
        """Arrival time of each slot."""

    @property
    def complete(self) -> bool:
        """True when all slots were submitted."""
        return len(self.slots) == self.length

    @property
    def recycled(self) -> bool:
        """True if the file was reused for another window before the transfer ended."""
        return self.file.name != self.name


@dataclass(eq=False)
class Replicator:
    """Background thread that keeps the replicas of one owner up to date. Any thread calls it.

    The thread compares the wanted with the known state of each peer, and performs the oldest
    missing step next. So a lost peer, a retry and a new peer need no special handling.

    Args:
        owner: rank whose windows these are.
        peers: clients by rank; the replicator owns them.
        on_window_replicated: called with a window once every peer has committed it.
        on_degraded: called with a reason when a peer is lost, refuses or falls behind; protection
            is reduced until `on_window_replicated` is called again. Both callbacks run on the
            replicator's thread.
        max_windows: maximum of waiting windows; beyond it the oldest is given up.

    Attributes:
        limit: maximum send rate in bytes/s; None: no limit.
        spreads: without a limit, send the slots of a window just fast enough that none waits when
            the last one arrives, by the sizes and times of the previous window.
        cost: CPU time of the sends.
        hurries: ignore all rates, as in a recovery.
    """

    owner: int
    peers: InitVar[Mapping[int, ReplicaClient]]
    _on_window_replicated: Callable[[WindowName], None]
    _on_degraded: Callable[[str], None]
    max_windows: int = 2

    def __post_init__(self, peers: Mapping[int, ReplicaClient]) -> None:
        self.cost = CpuCost()
        self._peers = {rank: _Peer(client) for rank, client in peers.items()}
        self._retired: deque[ReplicaClient] = deque()
        self._jobs: deque[_Job] = deque()
        self._reports: deque[str] = deque(maxlen=16)
        self._agreed = Agreed()
        # Bytes and seconds of the newest windows, oldest first; replaced, never modified.
        self._sent: dict[WindowName, tuple[int, float]] = {}
        self.limit: float | None = None
        self.spreads = False
        self.hurries: Callable[[], bool] = lambda: False
        # Slots of the previous window, and the bytes/s that would have spread them.
        self._spread: tuple[int, float | None] = (0, None)
        self._stopping = threading.Event()
        self._bucket = TokenBucket(self._stopping.wait, CHUNK_BYTES)
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name=f'replicator-{self.owner}', daemon=True
        )
        self._thread.start()

    def submit(self, file: WindowFile, slot: int, urgent: bool = False) -> None:
        """Queue a sealed slot; never blocks. After the last slot the peers commit.

        Called by the sealing thread, or by another thread for a committed window to resend
        (to new peers). `urgent` ignores rates, as the window has too few copies.
        """
        name = file.required_name()
        with self._changed:
            if self._agreed.is_given_up(name.start):
                return
            job = next((job for job in self._jobs if job.name == name), None)
            if job is None:
                job = _Job(file, name, file.length())
                # A peer receives one window at a time, so older windows must not come in between.
                self._jobs = deque(sorted([*self._jobs, job], key=lambda other: other.name))
                self._give_up_oldest()
            job.urgent |= urgent
            if slot not in job.slots:
                job.slots.append(slot)
                job.came.append(time.monotonic())
                if self.spreads and job.complete and not job.urgent:
                    self._spread = job.length, self._spread_rate(job)
            self._changed.notify()

    def abandon(self, window: WindowName) -> None:
        """Stop sending a window that was given up or will be recycled."""
        with self._changed:
            self._drop(window)

    def abandon_after(self, start: int) -> None:
        """Stop sending windows that begin after `start`; the peers keep received slots."""
        with self._changed:
            for job in [job for job in self._jobs if job.name.start > start]:
                self._drop(job.name)

    def agree(self, agreed: Agreed) -> None:
        """Note an agreement of all ranks; the next slot carries it to the peers.

        A window that another rank gave up is not sent any further.
        """
        with self._changed:
            self._agreed = self._agreed.then(agreed)
            for job in [job for job in self._jobs if self._agreed.is_given_up(job.name.start)]:
                self._drop(job.name)

    def discard_after(self, start: int) -> None:
        """Make all peers drop windows after `start`, before any other step."""
        with self._changed:
            self.abandon_after(start)
            for peer in self._peers.values():
                earlier = peer.discard_after
                peer.discard_after = start if earlier is None else min(earlier, start)
                peer.sent = {key for key in peer.sent if key[0].start <= start}
                peer.committed = {name for name in peer.committed if name.start <= start}
            self._agreed = self._agreed.without_persisted_after(start)
            self._changed.notify()

    def set_peers(
        self, peers: Mapping[int, ReplicaClient], windows: Iterable[WindowFile] = ()
    ) -> None:
        """Replace the peers after a recovery, and offer these committed windows to new peers."""
        with self._changed:
            addresses = {client.address for client in peers.values()}
            for peer in self._peers.values():
                self._retired.append(peer.client)
                if peer.client.address not in addresses:  # a lost node may not answer for minutes
                    peer.client.interrupt()
            pending = {rank: peer.discard_after for rank, peer in self._peers.items()}
            self._peers = {rank: _Peer(client, pending.get(rank)) for rank, client in peers.items()}
            for file in windows:
                for slot in file.slots():
                    self.submit(file, slot, urgent=True)
            self._changed.notify()

    @property
    def holders(self) -> int:
        """Number of peers that take whole windows. Any thread."""
        return sum(peer.client.takes_all for peer in self._peers.values())

    def bytes_per_s(self) -> float | None:
        """Rate at which peers took slots of the newest windows, bytes/s; None before the first.

        Measured over whole windows, as slot sizes vary, without slots that waited for their
        turn. Any thread.
        """
        of_windows = self._sent.values()
        seconds = sum(taken for _, taken in of_windows)
        return sum(nbytes for nbytes, _ in of_windows) / seconds if seconds else None

    def stop(self, timeout_s: float = 60.0) -> None:
        """End the thread after its current exchange; unsent windows are dropped."""
        self._stopping.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(timeout_s)
        for peer in self._peers.values():
            peer.client.close()

    def _give_up_oldest(self) -> None:
        while len(self._jobs) > self.max_windows:
            late = self._jobs[0].name
            self._drop(late)
            if self._agreed.is_outdated(late):
                continue  # a window for new peers, beside more useful ones
            self._reports.append(
                f'replication of rank {self.owner} falls behind: window {late.start} was given up'
            )

    def _drop(self, name: WindowName) -> None:
        self._jobs = deque(job for job in self._jobs if job.name != name)
        for peer in self._peers.values():
            peer.sent = {key for key in peer.sent if key[0] != name}
            peer.committed.discard(name)

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._changed:
                action = self._next_action()
                if action is None:
                    self._changed.wait(self._seconds_to_retry())
                    continue
            try:
                action()
            except Exception:  # replication must not end because a callback fails
                logger.exception('replicator of rank %d', self.owner)

    def _seconds_to_retry(self) -> float | None:
        now = time.monotonic()
        waits = [peer.retry_at - now for peer in self._peers.values() if peer.retry_at > now]
        return min(waits, default=None) if not self._stopping.is_set() else 0.0

    def _next_action(self) -> Callable[[], None] | None:
        if self._reports:
            return partial(self._on_degraded, self._reports.popleft())
        if self._retired:
            return self._retired.popleft().close
        for job in self._jobs:
            if job.recycled:
                self._drop(job.name)
                reason = f'window {job.name.start} was recycled before all replicas had it'
                return partial(self._on_degraded, reason)
            if job.complete and all(job.name in peer.committed for peer in self._peers.values()):
                return partial(self._report_replicated, job)
        now = time.monotonic()
        due = [(rank, peer) for rank, peer in self._peers.items() if peer.retry_at <= now]
        for rank, peer in due:
            if peer.discard_after is not None:
                return partial(
                    self._attempt, rank, peer, partial(self._discard, peer.discard_after)
                )
        for job, (rank, peer) in itertools.product(self._jobs, due):
            step = self._next_step(peer, job)
            if step is not None:
                return partial(self._attempt, rank, peer, step)
        return None

    def _report_replicated(self, job: _Job) -> None:
        """Report a replicated window, unless `discard_after` has dropped it."""
        with self._changed:
            if job in self._jobs:
                self._drop(job.name)
                self._on_window_replicated(job.name)

    def _next_step(self, peer: _Peer, job: _Job) -> Callable[[_Peer], None] | None:
        for slot in job.slots:
            if (job.name, slot) not in peer.sent:
                return partial(self._send, job, slot)
        if job.complete and job.name not in peer.committed:
            return partial(self._commit, job)
        return None

    def _send(self, job: _Job, slot: int, peer: _Peer) -> None:
        began, held_up = time.perf_counter(), self._bucket.held_up
        busy = time.thread_time()
        nbytes = peer.client.put_slot(
            self.owner,
            job.file,
            slot,
            self._agreed,
            lambda chunk: self._bucket.take(chunk, self._rate(job)),
        )
        if nbytes:
            self.cost.add(nbytes, time.thread_time() - busy)
        if nbytes and held_up == self._bucket.held_up:
            self._count(job.name, nbytes, time.perf_counter() - began)
        with self._changed:
            if job in self._jobs:  # not dropped meanwhile
                peer.sent.add((job.name, slot))

    def _rate(self, job: _Job) -> float | None:
        """Rate for the next bytes of a window in bytes/s; None: full speed."""
        if self._stopping.is_set() or job.urgent or job not in self._jobs or self.hurries():
            return None
        length, rate = self._spread
        if self.limit is not None or rate is None or job.complete or job.length != length:
            return self.limit
        return max(rate, 2.0 * MIN_BYTES_PER_SECOND)

    def _spread_rate(self, job: _Job) -> float | None:
        sizes = [job.file.payload(slot).size for slot in range(job.length)]
        gaps = [after - before for before, after in itertools.pairwise(job.came)]
        if not gaps or not self.holders:
            return None
        return spread(sizes, statistics.median(gaps), self.holders)

    def _count(self, name: WindowName, nbytes: int, seconds: float) -> None:
        before = self._sent.get(name, (0, 0.0))
        counted = {**self._sent, name: (before[0] + nbytes, before[1] + seconds)}
        self._sent = dict(list(counted.items())[-_WINDOWS_MEASURED:])

    def _commit(self, job: _Job, peer: _Peer) -> None:
        try:
            if not peer.client.commit(self.owner, job.name):
                self._ask_again(job, peer)
                return
        except OtherBytes as difference:  # the bytes stay different, so this is no copy
            self._on_degraded(f'window {job.name.start} has a copy fewer: {difference}')
        with self._changed:
            # Not before: a window that is refused as a whole is sent slot by slot.
            peer.failures = 0
            if job in self._jobs:
                peer.committed.add(job.name)

    def _ask_again(self, job: _Job, peer: _Peer) -> None:
        """Retry later: a twin captures the window soon, or never if it has joined since."""
        with self._changed:
            peer.retry_at = time.monotonic() + _BASE_RETRY_S
            newer = any(other.name > job.name for other in self._jobs)
            if newer and self._agreed.is_persisted(job.name.start):
                self._drop(job.name)

    def _discard(self, start: int, peer: _Peer) -> None:
        peer.client.discard_after(self.owner, start)
        with self._changed:
            if peer.discard_after == start:  # no newer request
                peer.discard_after = None

    def _attempt(self, rank: int, peer: _Peer, step: Callable[[_Peer], None]) -> None:
        """Perform one step with one peer; after a failure and a pause, offer it all slots again."""
        try:
            step(peer)
        except Exception as error:  # any error (invariant I6); an immediate retry would fail again
            with self._changed:
                # The peer may have restarted and lost received slots: offer all slots again.
                peer.sent.clear()
                delay = peer.backoff()
                if peer not in self._peers.values():
                    return
            self._on_degraded(f'replica on rank {rank}: {error}; next attempt in {delay:.1f} s')
