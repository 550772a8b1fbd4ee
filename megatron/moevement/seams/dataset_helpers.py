# SPDX-License-Identifier: Apache-2.0
"""Skips a compilation at start, as megatron-core's wheel has the compiled helpers.

At start, rank 0 runs `make` in megatron/core/datasets and exits if that fails. The wheel has the
compiled helpers there but no Makefile, so without this module no job starts from the wheel.
"""

import importlib

from megatron.moevement.seams import patches


def compiled() -> bool:
    """True if the compiled helpers of megatron-core's datasets can be imported."""
    try:
        importlib.import_module('megatron.core.datasets.helpers_cpp')
    except ImportError:
        return False
    return True


def use_compiled() -> None:
    """Skip upstream's compilation where the compiled helpers exist.

    Call after megatron imports, before `initialize_megatron`. In a source tree without compiled
    helpers, upstream's own compilation stays.
    """
    if compiled():
        patches.wrap('megatron.core.datasets.utils:compile_helpers', lambda original: None)
