# SPDX-License-Identifier: Apache-2.0
"""The benchmark of narrow formats: ratios within a round, and bytes beside those of the paper."""

from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.megatron.moevement.job.test_identity import parsed
from tests.unit.tools.samples import HARDWARE
from tools.bench import model, precision_overhead
from tools.bench.overhead import PLAIN, SPARSE, Run
from tools.lab import precisions

WINDOW = 4


def run_of(variant: str, iteration_s: float, slots: list[int], digest: str = 'same') -> Run:
    exposed = 1.5 if variant == SPARSE else None
    return Run(variant, iteration_s, [iteration_s], iteration_s, exposed, [WINDOW], slots, digest)


def rounds_of(*times: tuple[float, float], slots: list[int]) -> list[tuple[Run, Run]]:
    return [(run_of(PLAIN, plain, []), run_of(SPARSE, ours, slots)) for plain, ours in times]


def test_ratios_are_taken_within_a_round() -> None:
    rounds = rounds_of((1.0, 1.1), (4.0, 4.8), (2.0, 2.6), slots=[10] * WINDOW)
    row = precision_overhead.row('bf16', rounds, WINDOW, None)
    assert row.ratio.median == pytest.approx(1.2) and row.ratio.max == pytest.approx(1.3)
    assert row.cpu_ratio == row.ratio and row.exposed_ms.median == 1.5
    assert row.window_over_bf16 == row.expected_over_bf16 == row.paper_over_bf16 == 1
    assert row.identical


def test_bytes_stand_beside_those_of_the_paper() -> None:
    rounds = rounds_of((1.0, 1.0), slots=[7, 6, 5, 4])
    row = precision_overhead.row('c4', rounds, WINDOW, bf16_bytes=44)
    # A full and three halves of a light capture for each parameter; bf16: 12 and 2 bytes.
    assert row.window_over_bf16 == 0.5
    assert row.expected_over_bf16 == pytest.approx((6 + 1.5) / (12 + 3))
    assert row.paper_over_bf16 == pytest.approx((5 + 1.5) / (12 + 3))


def test_runs_that_end_differently_are_named() -> None:
    rounds = rounds_of((1.0, 1.0), slots=[1] * WINDOW)
    rounds.append((rounds[0][0], run_of(SPARSE, 1.0, [1] * WINDOW, digest='other')))
    row = precision_overhead.row('c2', rounds, WINDOW, 10)
    assert not row.identical
    report = precision_overhead.PrecisionOverheadReport(HARDWARE, True, WINDOW, 12, 4, 2, [row])
    with (console := Console(width=200)).capture() as shown:
        precision_overhead.print_report(report, console)
    assert 'DIFFERENT in c2' in shown.get() and 'stand-ins for Transformer Engine' in shown.get()


@pytest.mark.parametrize('name', precisions.FLAGS)
def test_flags_are_those_of_upstream_and_of_the_formats(name: str) -> None:
    flags = model.training_flags(Path('text'), 2, 12, Path('digest.json'), name)
    args = parsed(*flags)
    assert args.bf16 is (name != 'c1') and (args.fp8 is None) is (name in ('bf16', 'c1'))


@pytest.mark.parametrize(
    'flags', [['--rounds', '0'], ['--window', '0'], ['--iterations', '10', '--window', '8']]
)
def test_wrong_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        precision_overhead.parse_arguments(['--stand-ins', *flags])
    assert refused.value.code == 2
