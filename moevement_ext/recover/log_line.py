# SPDX-License-Identifier: Apache-2.0
"""What a recovery says in the log, in the grammar of Megatron's lines."""

from moevement_ext.recover.verification import Verified


def conversion_line(start: int, dense_at: int, source: str) -> str:
    """Announces a finished conversion of all stages, and where this rank's window came from."""
    return (
        f' sparse ckpt | converted window: {start} | from: {source} | dense at iteration: '
        f'{dense_at} | replayed iterations: {dense_at - start} |'
    )


def recovered_line(iteration: int, replayed: int, verified: Verified) -> str:
    """Says on a rank that replayed where it is again, and whether that is exact."""
    return (
        f' sparse ckpt | recovered at iteration: {iteration} | replayed iterations: {replayed} | '
        f'{verified} |'
    )
