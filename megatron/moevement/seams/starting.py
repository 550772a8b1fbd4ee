# SPDX-License-Identifier: Apache-2.0
"""Preparation of a process before Megatron is imported, for any entry point."""

import time
from collections.abc import Sequence

PROGRAM_START = time.time()
"""Time in seconds since the epoch, before torch is imported."""

from megatron.moevement.seams import cpu_device, preflight, quiet  # noqa: E402
from moevement_ext.system import user_errors  # noqa: E402


def prepare(flags: Sequence[str] | None) -> None:
    """Check the installation; redirect CUDA to the CPU on machines without a GPU.

    Args:
        flags: flags of the command line; None: this process does not train.
    """
    with user_errors.in_one_line():
        preflight.check_installation()
        if flags is not None and cpu_device.needed():
            quiet.refuse_without_gpu(flags)
    if cpu_device.needed():
        cpu_device.install()
