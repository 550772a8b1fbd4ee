# SPDX-License-Identifier: Apache-2.0
"""Training parameters that a custom loop declares."""

from dataclasses import dataclass, field
from datetime import timedelta

from moevement_ext.config import ConfigurationError, setting

_BACKENDS = ('nccl', 'gloo')


@dataclass(frozen=True)
class TrainingPlan:
    """Parameters of training that the configurations of Megatron-Core do not have."""

    train_iters: int = field(metadata={'help': 'Iterations at which training ends.'})
    seq_length: int = field(metadata={'help': 'Tokens per sample; the maximum if lengths differ.'})
    micro_batch_size: int = field(
        metadata={'help': 'Samples per micro-batch and data-parallel rank.'}
    )
    global_batch_size: int = field(
        metadata={'help': 'Samples per iteration, the same in all iterations.'}
    )
    backend: str = setting('nccl')("""Backend of `torch.distributed`: nccl, or gloo on machines
    without a GPU.""")
    timeout: timedelta = setting(timedelta(minutes=10))("""Limit of a collective, and of the
    rendezvous of all ranks.""")
    log_interval: int = setting(100)("""Iterations between two lines about protection on the last
    rank's standard output.""")
    copies_from_peers: bool = setting(False)("""Ranks with the same state (data parallelism without
    the distributed optimizer) also draw the same random numbers, independently of their data: a
    lost rank copies another rank's state. Otherwise its stage replays.""")

    def __post_init__(self) -> None:
        for name in ('seq_length', 'micro_batch_size', 'global_batch_size', 'log_interval'):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f'TrainingPlan.{name} {getattr(self, name)} must be at least 1.'
                )
        if self.backend not in _BACKENDS:
            raise ConfigurationError(
                f'TrainingPlan.backend {self.backend!r} must be nccl, or gloo without a GPU.'
            )
