# SPDX-License-Identifier: Apache-2.0
"""Processes that have torch at once: a fresh interpreter imports it for seconds."""

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOAD = ['torch.distributed', 'torch.testing._internal.distributed.fake_pg', 'psutil', 'xxhash']


def context() -> ForkServerContext:
    """Whose processes are forked from one that has imported what is often needed.

    Not on import: the server is that of the whole run, and other tests have their preload.
    """
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(PRELOAD)
    return context
