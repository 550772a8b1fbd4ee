# SPDX-License-Identifier: Apache-2.0
"""Memory that the hot spares of a node take beside its workers, as the workers count it."""

import os
from collections.abc import Mapping

VARIABLE = 'MOEVEMENT_HOT_SPARES'
"""Environment variable of a worker: number of hot spares that its launcher keeps on its node."""
EACH_BYTES = 512 << 20
"""Memory of one hot spare: 0.4 GiB after importing torch and Megatron on a CPU, plus a margin."""


def variables(count: int) -> dict[str, str]:
    return {VARIABLE: str(count)}


def memory_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Bytes of all hot spares of this node; 0 under launchers that keep none."""
    return int(environment.get(VARIABLE, '0')) * EACH_BYTES
