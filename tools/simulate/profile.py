# SPDX-License-Identifier: Apache-2.0
"""Profiles of workloads, the simulator's input: files, or the events of a run.

`--profile` takes a JSON object with the fields of Profile, or the folder of a run's events. Events
have no disk rate (`--disk-bandwidth`) and no number of micro-batches (`--micro-batches`); without
replicas they have no network rate (`--network-bandwidth`). Units are seconds, bytes and bytes per
second. All values describe one rank, the rank with the most bytes.
"""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from moevement_ext.events import Protected, Replanned, WindowCommitted
from moevement_ext.plan.byte_planner import DEFAULT_HIDDEN_FRACTION, OperatorTable

from ..lab.fields import Count, FieldError, NotNegative, Positive, require
from ..lab.history import Episode, History, read_history
from ..lab.programs import LabError
from ..model.description import DescriptionError
from .monte_carlo import Pipeline

COMPUTED_AGAIN = ('fetch', 'load', 'convert', 'catch_up')
"""Phases of a recovery that the simulator computes itself."""
_FLAGS = {'copy_bytes_per_s': '--copy-bandwidth', 'network_bytes_per_s': '--network-bandwidth'}


class OperatorProfile(msgspec.Struct, frozen=True):
    """One operator on this rank."""

    name: str
    full_bytes: Count
    weight_bytes: Count
    tokens: NotNegative | None = None
    """Tokens of an expert, in any unit; None for operators that every token passes."""

    def __post_init__(self) -> None:
        rule = f'give no more than full_bytes, {self.full_bytes}'
        require(self.weight_bytes <= self.full_bytes, 'weight_bytes', self.weight_bytes, rule)


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload on a machine."""

    format: Literal['moevement-profile/1']
    iteration_s: Positive
    """T, seconds without fault tolerance."""
    operators: tuple[OperatorProfile, ...]
    """Operators in the order of capture."""
    copy_bytes_per_s: Positive
    network_bytes_per_s: Positive
    """This rank's share of its node's links."""
    disk_bytes_per_s: Positive | None = None
    """This rank's share of the storage; None: unknown (only some systems need it)."""
    replicas: Count = 1
    restart_s: NotNegative = 0.0
    """Seconds from a failure until state can be loaded: detection, new process, new groups."""
    mtbf_s: Positive | None = None
    """Mean seconds between failures of the job; None: unknown."""
    pipeline: Pipeline = Pipeline()
    name: str = ''
    source: str = ''
    """Where the figures come from, for readers of the file."""

    def __post_init__(self) -> None:
        require(self.state_bytes > 0, 'operators', self.operators, 'list one with bytes')
        names = [operator.name for operator in self.operators]
        twice = sorted({name for name in names if names.count(name) > 1})
        require(not twice, 'operators', twice, 'list each of them once')

    @property
    def state_bytes(self) -> int:
        """Bytes of all operators in full: a dense checkpoint of this rank."""
        return sum(operator.full_bytes for operator in self.operators)

    @property
    def expert_bytes(self) -> int:
        return sum(op.full_bytes for op in self.operators if op.tokens is not None)

    @property
    def table(self) -> OperatorTable:
        sizes = np.array([(op.full_bytes, op.weight_bytes) for op in self.operators])
        return OperatorTable([op.name for op in self.operators], sizes[:, :1], sizes[:, 1:])

    @property
    def memory_bytes_per_s(self) -> float:
        """Rate at which state reaches host memory on this node and on the replicas' nodes."""
        if self.replicas == 0:
            return self.copy_bytes_per_s
        return min(self.copy_bytes_per_s, self.network_bytes_per_s / self.replicas)

    # Seconds that all operators in full take: to own memory, to all memories, and from another.

    @property
    def own_s(self) -> float:
        return self.state_bytes / self.copy_bytes_per_s

    @property
    def everywhere_s(self) -> float:
        return self.state_bytes / self.memory_bytes_per_s

    @property
    def load_s(self) -> float:
        return self.state_bytes / self.network_bytes_per_s

    @property
    def written_s(self) -> float:
        """To the storage, or from it. Raises FieldError: the rate is unknown."""
        if self.disk_bytes_per_s is None:
            rule = 'is missing; the profile does not say it, and this system uses a disk'
            raise FieldError('disk_bandwidth', rule)
        return self.state_bytes / self.disk_bytes_per_s

    @property
    def hidden_s(self) -> float:
        """Seconds of an iteration that hide copies."""
        return self.iteration_s * DEFAULT_HIDDEN_FRACTION

    def token_shares(self) -> np.ndarray | None:
        """Token share of each expert, float64 [experts], summing to 1; None without experts."""
        tokens = np.array([op.tokens for op in self.operators if op.tokens is not None])
        return tokens / tokens.sum() if tokens.size and tokens.sum() > 0 else None


# ---- from the events of a run


def derive(folder: Path, given: Mapping[str, float]) -> Profile:
    """Derive the profile of a run.

    Raises:
        DescriptionError: there are no events, or they are not sufficient.
        FieldError: a field breaks its rule.
    """
    try:
        history = read_history(folder)
    except LabError as error:
        raise DescriptionError(str(error)) from error
    pace, places = history.pace, history.places
    if pace is None or not places:
        raise DescriptionError(
            f'{folder}: no rank has trained from one window to the next yet; give the events of '
            'a longer run'
        )
    measured: dict[str, Any] = {
        'copy_bytes_per_s': _slowest(history, 'copy_bytes_per_s'),
        'network_bytes_per_s': _slowest(history, 'send_bytes_per_s'),
        **given,
    }
    for name, flag in _FLAGS.items():
        if measured[name] is None:
            raise DescriptionError(f'{folder}: the events do not say {name}; give {flag}')
    largest = max(places.values(), key=lambda place: sum(full for full, _ in _sizes(place)))
    back = [_restart_s(episode) for episode in history.episodes if episode.recovered]
    return Profile(
        format='moevement-profile/1',
        iteration_s=pace.iteration_s - pace.exposed_s,
        operators=_operators(history, largest),
        replicas=min(place.replicas for place in places.values()),
        restart_s=statistics.median(back or [history.trained_from - history.begun]),
        mtbf_s=history.mtbf_s,
        pipeline=_pipeline(places),
        **measured,
    )


def _sizes(place: Protected) -> list[tuple[int, int]]:
    return list(place.operators.values())


def _operators(history: History, place: Protected) -> tuple[OperatorProfile, ...]:
    """Operators of a rank; experts have equal shares until their popularity is known."""
    plans = history.newest(Replanned)
    shares = plans[place.rank].shares if place.rank in plans else {}
    tokens = {name: shares.get(name, 0.0 if shares else 1.0) for name in place.experts}
    operators = place.operators.items()
    return tuple(OperatorProfile(name, *sizes, tokens.get(name)) for name, sizes in operators)


def _slowest(history: History, field: str) -> float | None:
    """The slowest of all ranks' newest rates; None without any."""
    rates = (getattr(event, field) for event in history.newest(WindowCommitted).values())
    return min((rate for rate in rates if rate is not None), default=None)


def _restart_s(episode: Episode) -> float:
    """Seconds of a recovery, without loading and repeated work."""
    end = episode.end if episode.end is not None else episode.events[-1].time
    again = sum(episode.phases.get(name, 0.0) for name in COMPUTED_AGAIN)
    return max(end - episode.start - again, 0.0)


def _pipeline(places: Mapping[int, Protected]) -> Pipeline:
    """Nodes and stages; if they do not divide evenly, each stage counts as a node."""
    stages = 1 + max(place.stage for place in places.values())
    nodes = len({place.node for place in places.values()})
    if nodes % stages and stages % nodes:
        nodes = stages
    copies = min(place.copies for place in places.values())
    apart = math.gcd(copies, nodes // stages) if nodes >= stages else 1
    return Pipeline(nodes, stages, copies=apart)
