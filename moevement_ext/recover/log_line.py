# SPDX-License-Identifier: Apache-2.0
"""Log lines of a recovery, in the format of Megatron's lines."""

from moevement_ext.recover.verification import Verified


def conversion_line(start: int, dense_at: int, source: str) -> str:
    """Format the end of all stages' conversion, with the source of this rank's window."""
    return (
        f' sparse ckpt | converted window: {start} | from: {source} | dense at iteration: '
        f'{dense_at} | replayed iterations: {dense_at - start} |'
    )


def recovered_line(iteration: int, replayed: int, verified: Verified) -> str:
    """Format the end of a rank's replay: the iteration reached, and whether it is exact."""
    return (
        f' sparse ckpt | recovered at iteration: {iteration} | replayed iterations: {replayed} | '
        f'{verified} |'
    )
