# SPDX-License-Identifier: Apache-2.0
"""Which window: the shortest that the links of all ranks carry. For training and `tools.plan`.

Two links have limits of different kinds. What is *copied* to host memory must have arrived before
the next update writes over it: that limits each slot. What is *sent* to holders of replicas waits
in the file of its window, so a large slot may take several iterations: the mean over a window
counts, and that the queue is empty when the next window begins, which needs the file of the window
before (`memory.sizing.GENERATIONS`). Hence no byte waits anywhere but in files that are in the
budget of host memory already.

Where cores train, what is hidden is not free: helper threads take them from training, in proportion
to the bytes captured. So there the mean over a window is also held to a share of the cores. A
longer window does not help against what each slot costs whatever its size, and pays in longer
replays; so the last tenth of the bytes is not worth any slot (`WORTHWHILE`).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from moevement_ext.plan.byte_planner import (
    DEFAULT_HIDDEN_FRACTION,
    Operators,
    OperatorTable,
    balanced,
    hideable_budget,
)

DEFAULT_NETWORK_SHARE = 0.5
"""What replication takes, on average, of the rate at which a rank can send."""
SPREAD_MARGIN = 1.25
"""By which slots go faster than they must, as iterations are not all of one length."""
WORTHWHILE = 1.1
"""A longer window saves more than this factor of bytes, or is not taken for the cores' sake."""


class Need(NamedTuple):
    """Bytes an iteration that a window of some length takes, on the rank that needs most."""

    copied: int
    """The largest slot."""
    sent: int
    """To each holder of replicas, mean over the window."""
    burst: int
    """To each holder at the end of the window, so that all is sent before the next one begins."""


class Budgets(NamedTuple):
    """Bytes an iteration that the links of a rank carry, for each copy of what it captures."""

    copy_bytes: int
    """To host memory, before the next update."""
    network_bytes: int | None
    """To each holder of replicas, on average: a share of the link; None: there are no holders."""
    link_bytes: int | None
    """The same with the whole link, for an end of a window."""
    cpu_bytes: int | None = None
    """With the share of the cores that helper threads may take, on average; None: any."""

    @property
    def bytes(self) -> int:
        """The smaller one of what can be copied and sent."""
        return min(self.copy_bytes, self.network_bytes or self.copy_bytes)

    def carry(self, need: Need) -> bool:
        """True if a window that needs so much lengthens no iteration and is never skipped.

        What the cores would do is another matter, see `shortest`.
        """
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
) -> Budgets:
    """What the links of a rank carry in an iteration.

    Args:
        iteration_s: seconds of an iteration without checkpointing.
        copy_bytes_per_s: rate of copies to host memory.
        send_bytes_per_s: rate at which this rank sends, to one holder after the other; None: it is
            no limit, or not known.
        copies: holders of replicas.
        hidden_fraction: part of an iteration, in (0, 1], that hides a copy.
        network_share: part of the send rate, in (0, 1], that replication takes on average.
        network_bytes_per_s: what replication is held to at all times, in place of a share; None: to
            nothing.
        cpu_bytes_per_s: what may be captured so that helper threads keep to their share of the
            cores; None: as much as one likes.
    """
    copy = hideable_budget(copy_bytes_per_s, iteration_s, hidden_fraction)
    cpu = None if cpu_bytes_per_s is None else hideable_budget(cpu_bytes_per_s, iteration_s, 1.0)
    whole = held_to(send_bytes_per_s, 1.0, network_bytes_per_s)
    if whole is None or not copies:
        return Budgets(copy, None, None, cpu)
    link = hideable_budget(whole / copies, iteration_s, 1.0)
    share = network_share if network_bytes_per_s is None else 1.0
    return Budgets(copy, max(1, int(link * share)), link, cpu)


def held_to(link: float | None, share: float, limit: float | None) -> float | None:
    """Bytes/s that replication may take of a link; None: as many as it likes.

    Args:
        link: bytes/s that it carries; None: it is no limit, or not known.
        share: part of it, in (0, 1], where there is no limit.
        limit: `--sparse-ckpt-network-gb-per-s`, in bytes/s; None: none is given.
    """
    if limit is None:
        return None if link is None else link * share
    return limit if link is None else min(link, limit)


def spread(slot_bytes: Sequence[int], iteration_s: float, copies: int) -> float | None:
    """Bytes/s at which the slots of a window are sent by the time its last one comes.

    The end of a window goes over the whole link: when it is sent, the next one may begin.

    Args:
        slot_bytes: of all slots of a window of this rank.
        iteration_s: seconds of an iteration.
        copies: holders of replicas.

    Returns:
        None: there is nothing to be spread.
    """
    if len(slot_bytes) < 2 or iteration_s <= 0 or not copies:
        return None
    before_last = _need(np.array(slot_bytes[:-1], dtype=np.int64)[:, None])
    return SPREAD_MARGIN * copies * before_last.burst / iteration_s


def needs(operators: Operators, always: int = 0) -> Iterator[Need]:
    """What windows of 1, 2, ... slots take of a stage, in the given order; without an end.

    `always` is bytes that are in every slot of each rank besides. Another order of the operators
    moves this by less than an operator.
    """
    table = OperatorTable.of(operators)
    for window in count(1):
        slots = np.array(balanced(table, window).slot_bytes(table), dtype=np.int64)
        yield _need(slots + always)


def shortest(stages: Sequence[Iterable[Need]], carried: Budgets, longest: int) -> int | None:
    """The fewest slots that the links carry on every stage, and the cores can spare.

    A longer window may need more at its end than a shorter one, so all are looked at in turn. What
    cores spare is no reason to have none: where each window takes more than that, as a model is so
    small that what a slot costs whatever its size exceeds the share, it is the shortest of those
    that have nearly as few bytes as any (`WORTHWHILE`). As that is the least that is demanded of
    any window, slower cores never make it shorter.

    Returns:
        None: the links carry none of up to `longest`.
    """
    windows = enumerate(islice(zip(*stages, strict=True), longest), 1)
    on_links = (
        (window, max(need.sent for need in of_stages))
        for window, of_stages in windows
        if all(map(carried.carry, of_stages))
    )
    if carried.cpu_bytes is None:
        return next((window for window, _ in on_links), None)
    found = list(on_links)
    least = min((captured for _, captured in found), default=0)
    spared = max(carried.cpu_bytes, WORTHWHILE * least)
    return next((window for window, captured in found if captured <= spared), None)


def _need(slots: np.ndarray) -> Need:
    """From bytes of each slot on each rank, int64 (window, ranks)."""
    window, ranks = slots.shape
    if not ranks:
        return Need(0, 0, 0)
    # A slot and all after it have as many iterations as there are of them.
    left = slots[::-1].cumsum(axis=0)
    in_time = -(-left // np.arange(1, window + 1)[:, None])
    mean = -(-left[-1] // window)
    return Need(int(slots.max()), int(mean.max()), int(in_time.max()))
