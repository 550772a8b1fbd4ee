# SPDX-License-Identifier: Apache-2.0
"""Ways to make protection late or incomplete, which must cost protection and nothing else."""

import os

from moevement_ext.protect.checkpointer import SparseCheckpointer
from moevement_ext.replicate.replicator import Replicator

_LATE_ITERATIONS = 3
_FAILED_CAPTURE = 4


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

        def failing(self, window, slot, iteration, state):
            if iteration >= _FAILED_CAPTURE and not failing.done:
                failing.done = True
                raise ValueError('a capture that fails')
            capture(self, window, slot, iteration, state)

        failing.done = False
        SparseCheckpointer._capture = failing


_iteration = -1


def _note_iterations() -> None:
    begin = SparseCheckpointer.begin

    def noting(self, iteration, state):
        global _iteration
        _iteration = iteration
        begin(self, iteration, state)

    SparseCheckpointer.begin = noting
