# SPDX-License-Identifier: Apache-2.0
"""Events and log lines as a job writes them."""

from datetime import datetime, timedelta
from typing import Any

from moevement_ext.events import (
    Event,
    Protected,
    Recovered,
    Replanned,
    WindowCommitted,
    WindowPersisted,
)
from tools.bench.frame import Hardware
from tools.lab.run_log import Iteration, RunLog

START = datetime(2026, 1, 31, 23, 59, 58)
HARDWARE = Hardware('a processor', 2, 24.0, None, 0.1, '2.15', '0.19.2')
CONVERTED = (
    ' sparse ckpt | converted window: 2 | dense at iteration: 4 | replayed iterations: 2 |\n'
)
_DEFAULTS: dict[type[Event], dict[str, Any]] = {
    Protected: {'strategy': 'moevement', 'interval': 2},
    Recovered: {'replayed': 0, 'verified': 0, 'verified_at': -1, 'differing': [], 'seconds': {},
                'iterations': 0},
    Replanned: {'interval': 2},
    WindowCommitted: {'helpers_s': 0.0},
    WindowPersisted: {'start': 0, 'plan': 'a'},
}  # fmt: skip


def event(kind: type[Event], rank: int, time: float, **fields: Any) -> Event:
    """An event; irrelevant fields are filled in."""
    return kind(rank=rank, time=time, **{**_DEFAULTS.get(kind, {}), **fields})


def happened(
    kind: type[Event], rank: int, time: float, pid: int | None = None, **fields: Any
) -> Event:
    """An event of the process 10 + rank, unless another one is given."""
    return event(kind, rank, time, pid=10 + rank if pid is None else pid, **fields)


def logged(*lines: tuple[float, int]) -> RunLog:
    return RunLog([[Iteration(time, number, 500.0, 1.0) for time, number in lines]], [])


def iteration_line(
    number: int, seconds: float, loss: float = 5.0, elapsed_ms: float = 500.0, prefix: str = ''
) -> str:
    time = (START + timedelta(seconds=seconds)).strftime('%Y-%m-%d %H:%M:%S.%f')
    return (
        f'{prefix} [{time}] iteration {number:8d}/{9:8d} | consumed samples: {16 * number:12d} | '
        f'elapsed time per iteration (ms): {elapsed_ms:.1f} | learning rate: 2.1E-03 | '
        f'global batch size:    16 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 1.250 | '
        'number of skipped iterations:   0 | number of nan iterations:   0 |\n'
    )
