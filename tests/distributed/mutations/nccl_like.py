# SPDX-License-Identifier: Apache-2.0
"""Steps of recovery left out that only a backend like NCCL needs, and faults only it can have."""

import os
from datetime import timedelta

from moevement_ext import faults
from moevement_ext.membership.membership import Membership
from moevement_ext.recover.localized import LocalizedRecovery
from moevement_ext.regroup import nccl
from tests.distributed.harness import nccl_like


def garbage_is_not_looked_for() -> None:
    """Survivors update with whatever an aborted collective has left."""
    LocalizedRecovery._raise_if_broken = lambda self: None
    LocalizedRecovery.committing = lambda self: None


def groups_of_calls_stay_open() -> None:
    """A coalescing region that an error cut off is only forgotten."""
    nccl.Nccl.end_group = lambda self, backend: None


def aborts_one_after_the_other() -> None:
    """Each is waited for before the next begins."""
    close = nccl.Nccl.close
    nccl.Nccl.close = lambda self, backends: [close(self, [backend]) for backend in backends]


def rank_2_hangs_in_a_collective() -> None:
    """Once, in iteration 8, without being stuck by itself; collectives may take 10 s."""
    end_hang, wait = Membership._end_hang, nccl_like.waits._wait
    mine = (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) == ('2', '0')
    hung = []

    def sooner(self, *args):
        allowed, self._timeout = self._timeout, timedelta(seconds=10)
        end_hang(self, *args)
        self._timeout = allowed

    def hang(work):
        if mine and faults._iteration >= 8 and not hung:
            hung.append(work)
            raise RuntimeError('it takes for ever')
        return wait(work)

    Membership._end_hang = sooner
    nccl_like.waits._wait = hang


def gpu_of_rank_3_is_lost() -> None:
    """By the death of another: what it had mapped of that one's memory is gone."""
    if (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) == ('3', '0'):

        def lost(self):
            raise RuntimeError('CUDA error: an illegal memory access was encountered')

        nccl.Nccl.check_device = lost
