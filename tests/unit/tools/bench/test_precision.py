# SPDX-License-Identifier: Apache-2.0
"""The comparison of losses: what is averaged, compared, and said of what became NaN."""

import importlib.util
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.megatron.moevement.job.test_identity import parsed
from tests.unit.tools.samples import HARDWARE, iteration_line
from tools.bench import precision
from tools.lab import precisions
from tools.lab.errors import LabError
from tools.lab.launch import PROGRAM, ROOT
from tools.lab.run_log import RunLog, parse_log
from tools.plan.layout import PRECISIONS

ITERATIONS = 20


def log_of(*losses: float) -> RunLog:
    lines = (iteration_line(number, number, loss) for number, loss in enumerate(losses, 1))
    return parse_log(''.join(lines))


def test_the_last_tenth_is_averaged() -> None:
    falling = [float(ITERATIONS - number) for number in range(ITERATIONS)]
    assert precision.final_loss(log_of(*falling), ITERATIONS) == 1.5
    assert precision.averaged(ITERATIONS) == 2 and precision.averaged(5) == 1


def test_what_became_nan_has_no_loss() -> None:
    losses = [3.0] * (ITERATIONS - 1) + [float('nan')]
    assert precision.final_loss(log_of(*losses), ITERATIONS) is None
    with pytest.raises(LabError, match='no iteration'):
        precision.final_loss(parse_log(''), ITERATIONS)


def test_losses_are_compared_with_the_first_run() -> None:
    rows: list[precision.Row] = []
    for name, loss in (('bf16', 2.0), (precision.AGAIN, 2.1), ('c5', float('nan'))):
        log = log_of(5.0, *[loss] * (ITERATIONS - 1))
        rows.append(precision.row(name, log, ITERATIONS, rows))
    assert [row.over_bf16 for row in rows] == [0.0, pytest.approx(0.1), None]
    assert [row.bytes_full for row in rows] == [12, 12, 5]
    report = precision.PrecisionReport(HARDWARE, True, ITERATIONS, 2, rows)
    with (console := Console(width=200)).capture() as shown:
        precision.print_report(report, console)
    assert 'stand-ins for Transformer Engine' in shown.get()
    assert '+0.100' in shown.get() and 'NaN' in shown.get()


def test_all_configurations_of_the_paper_are_trained() -> None:
    assert set(precision.NAMES) - {precision.AGAIN} == set(precisions.FLAGS) == set(PRECISIONS)


@pytest.mark.parametrize('name', precision.NAMES)
def test_flags_are_those_of_upstream_and_of_the_formats(name: str) -> None:
    args = parsed(*precision.training_flags(name, Path('text'), 20, True))
    formats = PRECISIONS['bf16' if name == precision.AGAIN else name]
    assert ('fp8' if args.fp8_param_gather else 'fp16' if args.fp16 else 'bf16') == formats.compute
    master = 'fp8' if args.sparse_ckpt_fp8_masters else args.main_params_dtype
    kept = (master, args.exp_avg_dtype, args.exp_avg_sq_dtype)
    assert kept == (formats.master, formats.first_moment, formats.second_moment)


def test_stand_ins_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(SystemExit):
        precision.parse_arguments([])
    assert 'install it, or give --stand-ins' in capsys.readouterr().err
    asked = precision.parse_arguments(['--stand-ins'])
    assert precisions.program(asked.stand_ins) == precisions.STAND_INS != PROGRAM
    assert (ROOT / precisions.STAND_INS).is_file()
