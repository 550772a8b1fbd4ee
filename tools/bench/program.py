# SPDX-License-Identifier: Apache-2.0
"""`pretrain_gpt.py` with an emulated device on each node, as environment variables ask.

It computes one micro-batch at a time, which takes some seconds, beside the CPU's.
"""

import fcntl
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.moevement.seams import starting

MOEVEMENT_SPARES = True
SECONDS, DEVICES = 'MOEVEMENT_DEVICE_S', 'MOEVEMENT_DEVICES'
"""Environment variables: seconds of a micro-batch on a device; folder of the locks of devices."""

if __name__ == '__main__':
    starting.prepare(sys.argv[1:])
    from megatron.moevement import pretrain_gpt
    from megatron.moevement.pretrain_gpt import warm_up  # noqa: F401 - for a hot spare


def _on_device(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    device, seconds = Path(os.environ[DEVICES], os.environ['MOEVEMENT_NODE']), os.environ[SECONDS]

    def step(*args: Any, **named: Any) -> Any:
        with device.open('a') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(float(seconds))  # what is emulated, not a synchronisation
        return forward_step(*args, **named)

    return step


if __name__ == '__main__':
    if DEVICES in os.environ:
        pretrain_gpt.forward_step = _on_device(pretrain_gpt.forward_step)
    pretrain_gpt.main()
