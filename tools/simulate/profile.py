# SPDX-License-Identifier: Apache-2.0
"""Measurements of a training run (or known values of a planned one) as input of the systems.

A profile is a JSON object with the fields of Profile; units are seconds, bytes and bytes per
second. All values describe one rank, the rank with the most bytes.
"""

from dataclasses import dataclass

import numpy as np

from moevement_ext.plan.byte_planner import DEFAULT_HIDDEN_FRACTION

from . import fields
from .runs import Pipeline

FORMAT = 'moevement-profile/1'


@dataclass(frozen=True)
class OperatorProfile:
    """One operator on this rank."""

    name: str
    full_bytes: int
    """Bytes of master weights and optimizer moments."""
    weight_bytes: int
    """Bytes of compute weights."""
    tokens: float | None = None
    """Tokens of an expert, in any unit; None for operators that every token passes."""

    def __post_init__(self) -> None:
        fields.check(self, count='full_bytes weight_bytes', not_negative='tokens')
        rule = f'give no more than full_bytes, {self.full_bytes}'
        fields.require(
            self.weight_bytes <= self.full_bytes, 'weight_bytes', self.weight_bytes, rule
        )


@dataclass(frozen=True)
class Profile:
    """A workload on a machine."""

    format: str
    """FORMAT."""
    name: str
    source: str
    """Origin of the figures."""
    iteration_s: float
    """T, seconds without fault tolerance."""
    operators: tuple[OperatorProfile, ...]
    """Operators in the order of capture."""
    copy_bytes_per_s: float
    """Rate of copies to host memory during training."""
    network_bytes_per_s: float
    """This rank's share of its node's links."""
    disk_bytes_per_s: float | None = None
    """This rank's share of the storage; None: unknown (only some systems need it)."""
    replicas: int = 1
    """Copies of captured state on other nodes."""
    hidden_fraction: float = DEFAULT_HIDDEN_FRACTION
    """Part of an iteration that hides copies."""
    restart_s: float = 0.0
    """Seconds from a failure until state can be loaded: detection, new process, new groups."""
    mtbf_s: float | None = None
    """Mean seconds between failures of the job; None: unknown."""
    pipeline: Pipeline = Pipeline()

    def __post_init__(self) -> None:
        fields.require(self.format == FORMAT, 'format', self.format, f'must be {FORMAT!r}')
        rates = 'copy_bytes_per_s network_bytes_per_s disk_bytes_per_s'
        fields.check(self, positive=f'iteration_s mtbf_s {rates}', not_negative='restart_s',
                     count='replicas', part='hidden_fraction')  # fmt: skip
        fields.require(self.state_bytes > 0, 'operators', self.operators, 'list one with bytes')
        names = [operator.name for operator in self.operators]
        twice = sorted({name for name in names if names.count(name) > 1})
        fields.require(not twice, 'operators', twice, 'list each of them once')

    @property
    def state_bytes(self) -> int:
        """Bytes of all operators in full: a dense checkpoint of this rank."""
        return sum(operator.full_bytes for operator in self.operators)

    @property
    def expert_bytes(self) -> int:
        return sum(op.full_bytes for op in self.operators if op.tokens is not None)

    @property
    def memory_bytes_per_s(self) -> float:
        """Rate at which state reaches host memory on this node and on the replicas' nodes."""
        if self.replicas == 0:
            return self.copy_bytes_per_s
        return min(self.copy_bytes_per_s, self.network_bytes_per_s / self.replicas)

    @property
    def written_s(self) -> float:
        """Seconds to write all operators to the storage, or to read them.

        Raises:
            FieldError: the rate is unknown.
        """
        if self.disk_bytes_per_s is None:
            problem = 'is missing; the profile does not say it, and this system uses a disk'
            raise fields.FieldError('disk_bytes_per_s', problem)
        return self.state_bytes / self.disk_bytes_per_s

    @property
    def hidden_s(self) -> float:
        """Seconds of copying that an iteration hides."""
        return self.iteration_s * self.hidden_fraction

    def token_shares(self) -> np.ndarray | None:
        """Token share of each expert, float64 [experts], summing to 1; None without experts."""
        tokens = np.array([op.tokens for op in self.operators if op.tokens is not None])
        return tokens / tokens.sum() if tokens.size and tokens.sum() > 0 else None
