# SPDX-License-Identifier: Apache-2.0
"""Finds the shortest window that all ranks' links sustain. For training and `moevement plan`.

Two links have limits of different kinds. A *copy* to host memory must finish before the next update
overwrites its source, which limits each slot. Bytes to *send* to holders of replicas wait in the
file of their window, so sending a large slot may take several iterations. There the mean over a
window counts, and the queue must be empty when the next window begins, which needs the file of the
previous window (`window.format.GENERATIONS`). Hence bytes wait only in files that are part of the
host memory budget already.

Where cores train, hidden work is not free: helper threads take cores from training, in proportion
to the captured bytes. There a longer window pays if it saves more CPU time, beyond the share of the
cores granted to the helpers, than its replays are expected to cost (`Cores.cost`), and its files
take little more memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice, takewhile
from typing import NamedTuple

import numpy as np

from moevement_ext.plan.byte_planner import (
    DEFAULT_HIDDEN_FRACTION,
    OperatorTable,
    balanced,
    hideable_budget,
    window_bytes_bound,
)

DEFAULT_NETWORK_SHARE = 0.5
"""Average share of a rank's send rate that replication uses."""
SPREAD_MARGIN = 1.25
"""Factor on the necessary send rate of slots, as iterations vary in length."""
LONGEST_FOR_CORES = 2
"""No window becomes longer than this for the cores' sake: its replay has at most 2 W - 1
iterations."""
MEMORY_FOR_CORES = 1.25
"""Bytes of the files of such a window, over those of the shortest one that the links sustain."""


class Need(NamedTuple):
    """Bytes per iteration of a window, on the rank with the most."""

    copied: int
    """Bytes of the largest slot."""
    sent: int
    """Bytes to each holder of replicas, mean over the window."""
    burst: int
    """Bytes per iteration to each holder that are necessary to empty the queue by the window's
    end."""
    file: int = 0
    """Bytes of the window in any order of the operators."""


class Cores(NamedTuple):
    """What a capture may take of the cores where they train."""

    bytes: int
    """Average bytes of an iteration within the helper threads' share."""
    share: float
    """This share of the cores."""
    failures: float
    """Expected failures per iteration."""

    def cost(self, window: int, captured: int) -> float:
        """Iterations that such a window costs on average in each iteration, beyond the share."""
        excess = self.share * max(captured / self.bytes - 1.0, 0.0)
        return excess + 1.5 * window * self.failures


class Budgets(NamedTuple):
    """Bytes per iteration that a rank's links sustain, per copy of a capture."""

    copy_bytes: int
    """Bytes to host memory, before the next update."""
    network_bytes: int | None
    """Average bytes to each holder of replicas, a share of the link; None without holders."""
    link_bytes: int | None
    """Bytes to each holder over the whole link, at the end of a window."""
    cores: Cores | None = None
    """None: they do not train, or have no limit."""

    @property
    def bytes(self) -> int:
        return min(self.copy_bytes, self.network_bytes or self.copy_bytes)

    def carry(self, need: Need) -> bool:
        """True if such a window lengthens no iteration and is never skipped, cores ignored."""
        if need.copied > self.copy_bytes:
            return False
        if self.network_bytes is None or self.link_bytes is None:
            return True
        return need.sent <= self.network_bytes and need.burst <= self.link_bytes


def budgets(
    iteration_s: float,
    copy_bytes_per_s: float,
    send_bytes_per_s: float | None,
    copies: int,
    hidden_fraction: float = DEFAULT_HIDDEN_FRACTION,
    network_share: float = DEFAULT_NETWORK_SHARE,
    network_bytes_per_s: float | None = None,
    cpu_bytes_per_s: float | None = None,
    cpu_share: float = 0.0,
    failures_per_s: float = 0.0,
) -> Budgets:
    """Bytes that the links of a rank sustain in an iteration. None: no limit, or unknown.

    Args:
        iteration_s: seconds of an iteration without checkpointing.
        copy_bytes_per_s: rate of copies to host memory.
        send_bytes_per_s: send rate of this rank, to one holder after the other.
        copies: number of holders of replicas.
        hidden_fraction: part of an iteration, in (0, 1], that hides a copy.
        network_share: part of the send rate, in (0, 1], that replication takes on average.
        network_bytes_per_s: fixed rate limit of replication, instead of a share.
        cpu_bytes_per_s: capture rate at which helper threads stay within their share of the cores.
        cpu_share: this share.
        failures_per_s: expected failures per second.
    """
    copy = hideable_budget(copy_bytes_per_s, iteration_s, hidden_fraction)
    cores = None
    if cpu_bytes_per_s is not None:
        within = max(1, hideable_budget(cpu_bytes_per_s, iteration_s, 1.0))
        cores = Cores(within, cpu_share, failures_per_s * iteration_s)
    whole = held_to(send_bytes_per_s, 1.0, network_bytes_per_s)
    if whole is None or not copies:
        return Budgets(copy, network_bytes=None, link_bytes=None, cores=cores)
    link = hideable_budget(whole / copies, iteration_s, 1.0)
    share = network_share if network_bytes_per_s is None else 1.0
    network = max(1, int(link * share))
    return Budgets(copy, network_bytes=network, link_bytes=link, cores=cores)


def held_to(link: float | None, share: float, limit: float | None) -> float | None:
    """Rate limit of replication on a link in bytes/s; None: no limit.

    Args:
        link: rate of the link in bytes/s; None: no limit, or unknown.
        share: part of the link, in (0, 1], used without `limit`.
        limit: `--sparse-ckpt-network-gb-per-s`, in bytes/s; None: not given.
    """
    if limit is None:
        return None if link is None else link * share
    return limit if link is None else min(link, limit)


def checkpoint_s(
    nbytes: int, copied: float | None, sent: float | None, copies: int, limit: float | None
) -> tuple[float, float] | None:
    """Seconds of a copy to host memory, and of the copy followed by the sends to all holders.

    Args:
        nbytes: of a checkpoint of one slot.
        copied: rate of copies to host memory in bytes/s; None before the first.
        sent: send rate in bytes/s; None before the first unthrottled send.
        copies: number of holders of replicas.
        limit: as in `held_to`; throttled sends are not measured, so this may be the only known
            rate.

    Returns:
        None if a rate is unknown.
    """
    rate = held_to(sent, 1.0, limit)
    if copied is None or (copies and rate is None):
        return None
    own_s = nbytes / copied
    return own_s, own_s + (copies * nbytes / rate if rate else 0.0)


def spread(slot_bytes: Sequence[int], iteration_s: float, copies: int) -> float | None:
    """Rate in bytes/s that sends all slots except the last before the last slot is captured.

    The last slot uses the whole link: once it is sent, the next window may begin. None if there
    is nothing to spread.
    """
    if len(slot_bytes) < 2 or iteration_s <= 0 or not copies:
        return None
    before_last = _need(np.array(slot_bytes[:-1], dtype=np.int64)[:, None])
    return SPREAD_MARGIN * copies * before_last.burst / iteration_s


def needs(operators: OperatorTable, always: int = 0) -> Iterator[Need]:
    """Yield endlessly the needs of windows of 1, 2, ... slots on a stage, in the given order.

    `always` is additional bytes in every slot of each rank. Another order of each rank's own
    operators changes a need by less than an operator.
    """
    for window in count(1):
        need = _need(balanced(operators, window).slot_bytes(operators) + always)
        largest = window_bytes_bound(operators, window).max(initial=0) + window * always
        yield need._replace(file=int(largest))


def shortest(stages: Sequence[Iterable[Need]], carried: Budgets, longest: int) -> int | None:
    """Return the fewest slots that the links sustain on every stage.

    Where cores train, it is one of up to `LONGEST_FOR_CORES` slots that costs them less (`Cores`).
    A longer window may need more at its end than a shorter one, so all lengths are tried in turn.
    None if the links sustain no window of up to `longest` slots.
    """
    windows = enumerate(islice(zip(*stages, strict=True), longest), 1)
    sustained = (
        (window, max(need.sent for need in of_stages), max(need.file for need in of_stages))
        for window, of_stages in windows
        if all(map(carried.carry, of_stages))
    )
    first = next(sustained, None)
    if first is None or carried.cores is None:
        return None if first is None else first[0]
    cores, most = carried.cores, MEMORY_FOR_CORES * first[2]
    longer = takewhile(lambda found: found[0] <= LONGEST_FOR_CORES, sustained)
    found = [first, *(window for window in longer if window[2] <= most)]
    return min(found, key=lambda window: cores.cost(*window[:2]))[0]


def _need(slots: np.ndarray) -> Need:
    """Need of a window, from bytes of each slot on each rank, int64 (window, ranks)."""
    window, ranks = slots.shape
    if not ranks:
        return Need(0, 0, 0)
    # The last n slots have n iterations for sending.
    left = slots[::-1].cumsum(axis=0)
    in_time = -(-left // np.arange(1, window + 1)[:, None])
    mean = -(-left[-1] // window)
    return Need(int(slots.max()), int(mean.max()), int(in_time.max()))
