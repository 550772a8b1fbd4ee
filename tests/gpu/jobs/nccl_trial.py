# SPDX-License-Identifier: Apache-2.0
"""Check: replaces killed ranks, with NCCL's own kernels hanging and aborted."""

from collections.abc import Iterator
from typing import Any

import msgspec

from tests.gpu.jobs.findings import Findings, Settings
from tools.gpu_check.nccl import Case, control, judge, run_case, worst_drift
from tools.gpu_check.nccl_rank import Measured
from tools.lab.errors import LabError

_CASES = {
    '2 ranks': Case(2, (1, 1, 1, 0)),
    '3 ranks': Case(3, (2, 1, 2)),
}


def run(settings: Settings) -> Iterator[Findings]:
    """Run all trials; on a GPU also the trial that must fail."""
    for name, case in _CASES.items():
        try:
            measured = run_case(case, settings.backend)
        except LabError as error:
            yield Findings({}, [f'{name}: {error}'])
            continue
        drift = worst_drift(measured)
        cycles = {'drift': drift, 'cycles': msgspec.to_builtins(measured)}
        problems = [f'{name}: {problem}' for problem in judge(drift)]
        yield Findings({**_shown(case.ranks, measured), name: cycles}, problems)
    if settings.gpu:  # gloo has no groups that could stay open
        without_repair, nothing_shown = control(settings.backend)
        yield Findings({'without_repair': without_repair}, nothing_shown)


def _shown(ranks: int, measured: list[Measured]) -> dict[str, Any]:
    return {
        f'unblock_s_{ranks}': max(cycle.unblock_s for cycle in measured),
        f'renew_s_{ranks}': max(cycle.renew_s for cycle in measured),
        f'first_send_{ranks}': '; '.join(sorted({cycle.first_send for cycle in measured})),
        f'next_send_{ranks}': '; '.join(sorted({cycle.next_send for cycle in measured})),
        f'left_open_{ranks}': max(cycle.left_open for cycle in measured),
    }
