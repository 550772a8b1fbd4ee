# SPDX-License-Identifier: Apache-2.0
"""Measures the simulator itself: seconds of one core for 10,000 hours of a 16,384-GPU job.

    python -m tools.bench.simulate

2,048 nodes of 8 GPUs in 16 pipeline stages, with the failure rate of OPT-175B (one in 7,500 GPU
hours, every 27 minutes). Once with each kind of failures and recovery that the simulator knows.

Exit status: 0 if every case took less than a minute, else 1.
"""

import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from tools.lab.arguments import Parser
from tools.simulate.closed_form import Dense, Sparse
from tools.simulate.failures import Correlated, Renewal
from tools.simulate.monte_carlo import Estimate, Spares, simulate
from tools.simulate.partial import PartialExperts, PartialRun
from tools.simulate.pipeline import Pipeline
from tools.simulate.runs import CopyRun, SparseRun

GPUS, GPU_HOURS_PER_FAILURE = 16384, 7500.0
MTBF_S = GPU_HOURS_PER_FAILURE * 3600 / GPUS
LIMIT_S = 60.0

_PIPELINE = Pipeline(nodes=2048, stages=16, micro_batches=64, copies=2)
_SPARSE = Sparse(4.0, 8, 0.05, 30.0, MTBF_S)
_DENSE = Dense(4.0, 50, 0.0, 8.0, 60.0, MTBF_S)
_SPARES = Spares(32, 4 * 3600.0)


def cases(hours: float) -> dict[str, Callable[[], Estimate]]:
    """What is timed, by name."""
    shares = np.full(64, 1 / 64)
    correlated = Correlated(MTBF_S, neighbours=0.5, repeat=0.2)
    nodes = _PIPELINE.nodes
    return {
        'dense, Poisson': lambda: simulate(_DENSE, hours=hours),
        'sparse, Poisson': lambda: simulate(_SPARSE, hours=hours),
        'sparse, Weibull': lambda: simulate(_SPARSE, Renewal(MTBF_S, 0.7), hours=hours),
        'localized, correlated, spares': lambda: simulate(
            lambda histories, rng: SparseRun(_SPARSE, histories, rng, _PIPELINE),
            correlated,
            nodes=nodes,
            spares=_SPARES,
            hours=hours,
        ),
        'copies, correlated, spares': lambda: simulate(
            lambda histories, rng: CopyRun(_SPARSE, 40.0, histories, rng, _PIPELINE),
            correlated,
            nodes=nodes,
            spares=_SPARES,
            hours=hours,
        ),
        'partial experts, 100 jobs': lambda: simulate(
            lambda histories, rng: PartialRun(
                _DENSE,
                PartialExperts(64, 8, lost_budget=0.0375),
                shares,
                histories,
                hours * 36,
            ),
            hours=hours,
            job_hours=hours / 100,
        ),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = Parser(
        prog='python -m tools.bench.simulate',
        description=__doc__,
    )
    parser.add_argument('--hours', type=float, default=10_000.0, help='to simulate')
    args = parser.parse_args(argv)
    if not args.hours > 0:
        parser.error(f'--hours {args.hours}: must be above 0')
    table = Table()
    for column in ('case', 'simulated hours', 'failures', 'ETTR', 'seconds'):
        table.add_column(column, justify='left' if column == 'case' else 'right')
    slowest = 0.0
    for name, run in cases(args.hours).items():
        began = time.process_time()
        found = run()
        seconds = time.process_time() - began
        slowest = max(slowest, seconds)
        width = (found.ci95[1] - found.ci95[0]) / 2
        table.add_row(
            name,
            f'{found.hours:,.0f}',
            f'{found.failures:,}',
            f'{found.ettr:.4f} ± {width:.4f}',
            f'{seconds:.2f}',
        )
    Console().print(table)
    return 0 if slowest < LIMIT_S else 1


if __name__ == '__main__':
    sys.exit(main())
