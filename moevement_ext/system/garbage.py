# SPDX-License-Identifier: Apache-2.0
"""Keeps what a process has imported and set up out of garbage collections.

A survivor collects garbage in each recovery. Megatron and torch are some 400,000 objects, which a
collection would visit for tenths of a second of CPU time, on all ranks of a host at once.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def settled() -> Iterator[None]:
    """Collect garbage; collections within the context skip all objects that exist now.

    What exists now and is dropped within the context is freed then, unless it is part of a cycle.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
