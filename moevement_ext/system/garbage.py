# SPDX-License-Identifier: Apache-2.0
"""Excludes objects from imports and set-up from garbage collections.

A survivor collects garbage in each recovery. Megatron and torch consist of some 400,000 objects;
visiting them takes tenths of a second of CPU time, on all ranks of a host at once.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """Collect garbage once; collections within the context skip all objects that exist now.

    Skipped objects are still freed when their last reference is dropped, but not if they are
    part of a reference cycle.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
