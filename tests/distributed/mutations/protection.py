# SPDX-License-Identifier: Apache-2.0
"""Ways to make protection late or incomplete, which must cost protection and nothing else."""

import itertools
import os
import statistics
import time
from collections import deque

from moevement_ext.protect.checkpointer import SparseCheckpointer
from moevement_ext.protect.protection import Protection
from moevement_ext.replicate.client import ReplicaClient
from moevement_ext.replicate.replicator import Replicator

_LATE_ITERATIONS = 3
_FAILED_CAPTURE = 4
SLOW_WINDOWS = range(16, 50)
"""Those that begin in these iterations."""


def late_replicas_of_rank_1_and_a_failed_capture_on_rank_2() -> None:
    """Holders commit each window of rank 1 three iterations late; rank 2 fails to capture one."""
    _note_iterations()
    if os.environ['RANK'] == '1':
        commit = Replicator._commit

        def late(self, job, peer):
            while _iteration < job.name.start + _LATE_ITERATIONS and not self._stopping.wait(0.01):
                pass
            commit(self, job, peer)

        Replicator._commit = late
    if os.environ['RANK'] == '2':
        capture = SparseCheckpointer._capture

        def failing(self, window, slot, iteration, *given):
            if iteration >= _FAILED_CAPTURE and not failing.done:
                failing.done = True
                raise ValueError('a capture that fails')
            capture(self, window, slot, iteration, *given)

        failing.done = False
        SparseCheckpointer._capture = failing


_iteration = -1


def _note_iterations() -> None:
    begin = SparseCheckpointer.begin

    def noting(self, iteration, *given):
        global _iteration
        _iteration = iteration
        begin(self, iteration, *given)

    SparseCheckpointer.begin = noting


def rank_1_keeps_only_its_first_window() -> None:
    """Until it dies, holders do not commit its others."""
    if os.environ['RANK'] != '1' or os.environ['TORCHELASTIC_RESTART_COUNT'] != '0':
        return
    commit = Replicator._commit

    def first(self, job, peer):
        if job.name.start > 0:
            self._stopping.wait()
        commit(self, job, peer)

    Replicator._commit = first


def what_rank_1_lacks_after_a_copy_is_waited_for() -> None:
    """No rank gives up the windows under way."""
    rank_1_keeps_only_its_first_window()
    begin = Protection.begin_window

    def waiting(self, iteration):
        self.windows.give_up = lambda starts: None
        begin(self, iteration)
        del self.windows.give_up

    Protection.begin_window = waiting


def holders_of_rank_1_are_slow_for_a_while() -> None:
    """They take as long as two iterations for as much as rank 1 captures in all."""
    if os.environ['RANK'] != '1':
        return
    begin, put = SparseCheckpointer.begin, ReplicaClient.put_slot
    begun = deque([time.perf_counter()], maxlen=10)
    largest = 0

    def noting(self, iteration, *given):
        begun.append(time.perf_counter())
        begin(self, iteration, *given)

    def slow(self, owner, file, slot, *args):
        nonlocal largest
        nbytes = put(self, owner, file, slot, *args)
        largest = max(largest, nbytes)
        if file.name is not None and file.name.start in SLOW_WINDOWS:
            gaps = [later - earlier for earlier, later in itertools.pairwise(begun)]
            time.sleep(2 * statistics.median(gaps) * nbytes / largest)
        return nbytes

    SparseCheckpointer.begin = noting
    ReplicaClient.put_slot = slow
