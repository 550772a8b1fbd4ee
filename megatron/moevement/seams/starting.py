# SPDX-License-Identifier: Apache-2.0
"""What must be so before Megatron is imported, by whatever file a process has been started with."""

import time
from collections.abc import Sequence

PROGRAM_START = time.time()
"""Seconds since the epoch, before torch is imported."""

from megatron.moevement.seams import cpu_device, preflight, quiet  # noqa: E402
from moevement_ext.process import user_errors  # noqa: E402


def prepare(flags: Sequence[str] | None) -> None:
    """Check the installation; put the CPU in the place of a GPU that is not there.

    Args:
        flags: of the command line, if this process is to train with them.
    """
    with user_errors.in_one_line():
        preflight.check_installation()
        if flags is not None and cpu_device.needed():
            quiet.refuse_without_gpu(flags)
    if cpu_device.needed():
        cpu_device.install()
