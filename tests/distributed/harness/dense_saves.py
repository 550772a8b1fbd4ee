# SPDX-License-Identifier: Apache-2.0
"""Cheap dense saves: the process that collects the results of a save is a fork, too.

Megatron starts a fresh interpreter for it in every process that saves. It imports torch before the
save can end, which takes seconds on busy cores, again after each death.
"""

import multiprocessing
import os
import threading
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.managers import SyncManager
from typing import Any

import psutil
from megatron.core.dist_checkpointing.strategies import filesystem_async

_ADDRESS = 'MOEVEMENT_TEST_FORK_SERVER'


def environment() -> dict[str, str]:
    """Variables by which a worker finds the fork server that it comes from."""
    forkserver.ensure_running()
    return {_ADDRESS: forkserver._forkserver._forkserver_address}


def install() -> None:
    """Called in each worker before its program."""
    server = forkserver._forkserver
    server._forkserver_address = os.environ[_ADDRESS]
    server.ensure_running = resource_tracker.ensure_running
    filesystem_async.get_write_results_queue = _results


@cache
def _manager() -> SyncManager:
    manager = SyncManager(ctx=multiprocessing.get_context('forkserver'))
    manager.start(_end_with, (os.getpid(),))
    return manager


@cache
def _results() -> Any:
    filesystem_async._results_queue = _manager().Queue()
    return filesystem_async._results_queue


def _end_with(worker: int) -> None:
    """End this process with the worker, whatever that dies of."""

    def wait() -> None:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(worker).wait()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
