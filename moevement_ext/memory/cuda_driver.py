# SPDX-License-Identifier: Apache-2.0
"""CUDA's driver, for what torch has no call for, or only one that holds the GIL."""

import ctypes
import functools

_DRIVER = 'libcuda.so.1'


@functools.cache
def driver() -> ctypes.CDLL:
    """Its functions, which are called without the GIL."""
    return ctypes.CDLL(_DRIVER)
