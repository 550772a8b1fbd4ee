# SPDX-License-Identifier: Apache-2.0
"""Memory that the hot spares of a node take beside its workers, as these know it."""

import os
from collections.abc import Mapping

VARIABLE = 'MOEVEMENT_HOT_SPARES'
"""Environment variable of a worker: number of hot spares that its launcher keeps on its node."""
EACH_BYTES = 512 << 20
"""What one takes: 0.4 GiB once it has imported torch and Megatron on a CPU, and some room."""


def variables(count: int) -> dict[str, str]:
    """Environment variables of workers beside `count` spares."""
    return {VARIABLE: str(count)}


def memory_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Bytes of all hot spares of this node; 0 under launchers that keep none."""
    return int(environment.get(VARIABLE, '0')) * EACH_BYTES
