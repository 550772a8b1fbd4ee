# SPDX-License-Identifier: Apache-2.0
"""Spares upstream the compilation of what its wheel ships compiled.

At start, rank 0 runs `make` in megatron/core/datasets and exits if that fails. The wheel has the
compiled helpers there but no Makefile, so that no job would start from it, on a GPU or not.

Checked against megatron-core 0.19.2.
"""

import importlib

from megatron.moevement.seams import patches


def compiled() -> bool:
    """Whether the compiled helpers of megatron-core's datasets can be imported."""
    try:
        importlib.import_module('megatron.core.datasets.helpers_cpp')
    except ImportError:
        return False
    return True


def use_compiled() -> None:
    """Have upstream compile nothing where nothing is missing.

    To be called after megatron imports, before `initialize_megatron`. In a source tree whose
    helpers were never compiled, upstream's own compilation stays.
    """
    if compiled():
        patches.wrap('megatron.core.datasets.utils:compile_helpers', lambda original: None)
