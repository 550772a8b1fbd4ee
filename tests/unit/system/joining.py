# SPDX-License-Identifier: Apache-2.0
"""A process under torchrun that joins a job."""

import signal
from datetime import timedelta
from pathlib import Path

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.job import joining
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.system import watchdog


def join(directory: Path, world_size: int, timeout_s: float, trains: bool) -> None:
    config = SparseCheckpointConfig(dir=str(directory), hang_timeout=2.0)
    timeout = timedelta(seconds=timeout_s)
    joining.join(RankIdentity('run', 'pp1', 0), world_size, 'run', 'gloo', config, timeout)
    if trains:
        watchdog.set_up_is_over()
    print('joined', flush=True)
    signal.pause()
