# SPDX-License-Identifier: Apache-2.0
"""CUDA driver calls that torch lacks, or makes while holding the GIL."""

import ctypes
import functools

_DRIVER = 'libcuda.so.1'


@functools.cache
def driver() -> ctypes.CDLL:
    """The driver library; its functions run without the GIL."""
    return ctypes.CDLL(_DRIVER)
