# SPDX-License-Identifier: Apache-2.0
"""Detects useless replacements of workers, and replacements that hang before they join."""

import time
from collections.abc import Sequence

from torch.distributed import Store

from moevement_ext.errors import EXIT_OTHER_BITS, EXIT_USER_ERROR, LaunchError
from moevement_ext.launch.statements import told_joining, told_survivors
from moevement_ext.launch.worker import BadEnd, Worker

_MAX_ERRORS = 3
_ERRORS_WITHIN_S = 600.0
# Limit for a replacement to import the program and join; survivors wait longer.
_TO_JOIN_S = 300.0


def refuse_mistakes(ends: Sequence[BadEnd], workers: Sequence[Worker]) -> None:
    """Refuse to replace a worker after a user error, with a `LaunchError`.

    A user error exists from the start, so a new worker would repeat it. After a replacement
    of any of the `workers` the same exit status may have another cause, such as too little
    memory on one node, and is no longer refused. A recovery that computes other bits, with
    `--sparse-ckpt-verify stop`, ends the job at any time.
    """
    for end in ends:
        if end.code == EXIT_OTHER_BITS:
            raise LaunchError(
                f'{end.how}: a recovery computed other bits{end.worker.last_words()}', end.code
            )
        if end.code == EXIT_USER_ERROR and not any(worker.restarts for worker in workers):
            raise LaunchError(
                f'{end.how}: it refuses what it was started with{end.worker.last_words()}',
                EXIT_USER_ERROR,
            )


def refuse_useless(end: BadEnd, max_restarts: int, restarted: Sequence[Worker] = ()) -> None:
    """Raise `LaunchError` if the rank was restarted, or failed, too often.

    Errors count for their own rank. If all `restarted` workers restart, those of all ranks
    count together: a program that fails by itself may fail on another rank at each restart.
    """
    if end.is_error:
        if end.at not in end.worker.errors:  # an end is judged again after the loss of a store
            end.worker.errors.append(end.at)
        _refuse_errors(end, restarted)
    # Counted per rank: the loss of a node, or of the whole job, restarts up to hundreds of ranks.
    if end.worker.restarts >= max_restarts:
        raise LaunchError(f'{end.how} and --max-restarts {max_restarts} is used up.')


def _refuse_errors(end: BadEnd, restarted: Sequence[Worker]) -> None:
    since = time.monotonic() - _ERRORS_WITHIN_S
    own = sum(at > since for at in end.worker.errors)
    together = {
        worker.rank: sum(at > since for at in worker.errors)
        for worker in restarted
        if any(at > since for at in worker.errors)
    }
    if own >= _MAX_ERRORS:
        failed = f'it failed by itself {own} times'
    elif sum(together.values()) >= _MAX_ERRORS:
        ranks = ', '.join(map(str, sorted(together)))
        failed = f'ranks {ranks} failed by themselves {sum(together.values())} times in all'
    else:
        return
    raise LaunchError(
        f'{end.how}; {failed} within {_ERRORS_WITHIN_S / 60:.0f} minutes{end.worker.last_words()}'
    )


def late_workers(store: Store, living: Sequence[Worker]) -> list[Worker]:
    """Return the workers that have not joined in time and must be killed, each worker once.

    They hang before the rendezvous, where other ranks cannot detect it. Sends no request to
    the store before a worker can be late. The first process of a rank that joins may take any
    time: a cold start of the whole job may take long. `store` is the part of this launch;
    raises `DistError` if it does not answer.
    """
    overdue = [worker for worker in living if worker.child.is_new_for_s > _TO_JOIN_S]
    if not (overdue and any(worker.restarts for worker in living) and told_survivors(store)):
        return []
    joined = {worker.rank: told_joining(store, worker.rank) for worker in overdue}
    for worker in overdue:
        worker.child.is_settled = True
    return [worker for worker in overdue if joined[worker.rank] not in (None, worker.process)]
