# SPDX-License-Identifier: Apache-2.0
"""Figures and last lines of the benchmarks of overhead, of guests and of the start of a process."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.megatron.moevement.job.test_identity import parsed
from tests.unit.tools.samples import HARDWARE
from tools.bench.guests import GUESTS, ROUTES, GuestsBench, lived
from tools.bench.overhead import AGAIN, FORMATS, PLAIN, SPARSE, OverheadBench, Run
from tools.bench.start import PLAIN as ALONE
from tools.bench.start import SPARE, TORCHRUN, Start, StartBench
from tools.lab import models, presets
from tools.lab.run_log import Iteration, RunLog
from tools.model.layout import PRECISIONS


def bench(*flags: str) -> OverheadBench:
    return OverheadBench(OverheadBench.parse(flags), Path('out'), Path('data'))


def run_of(iteration_s: float, digest: str, windows: str | None) -> Run:
    return Run(
        iteration_s=iteration_s, all_iterations_s=[], cpu_s=2 * iteration_s,
        helpers_s=iteration_s / 4, exposed_ms=None, windows=windows, slots=None, digest=digest,
    )  # fmt: skip


def test_runs_are_compared_within_a_precision() -> None:
    one = bench('--precision', 'c1', '--stand-ins')
    assert [*one.titles()] == ['bf16/plain', 'bf16/sparse', 'c1/plain', 'c1/sparse']
    runs = (
        run_of(1, 'a', None),
        run_of(1.5, 'a', '2'),
        run_of(2, 'b', None),
        run_of(2.2, 'c', '4'),
    )
    found = one.summary(HARDWARE, [dict(zip(one.titles(), runs, strict=True))])
    assert found.ways[f'c1/{SPARSE}'].figures['ratio'].median == pytest.approx(1.1)
    assert found.ways[f'c1/{PLAIN}'].figures['ratio'].median == 1
    assert found.ways[f'bf16/{SPARSE}'].figures['helpers'].median == pytest.approx(1.5 / 8)
    assert found.ways[f'c1/{SPARSE}'].words == {'windows': '4'}
    assert not {'exposed_ms', 'overhead'} & found.ways[f'c1/{SPARSE}'].figures.keys()
    assert found.different == ['c1'] and found.notes[-1].endswith(': DIFFERENT in c1.')


# Formats


def test_a_cpu_that_emulates_bf16_trains_in_fp32(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processors = tmp_path / 'cpuinfo'
    monkeypatch.setattr(models, '_PROCESSORS', processors)
    for flags, bf16 in {'fpu avx avx2': False, 'fpu avx2 avx512bw': True}.items():
        processors.write_text(f'model name\t: EPYC\nflags\t\t: {flags}\n')
        assert ('--bf16' in presets.measured_flags(Path('text'), 12)) is bf16
        assert models.native_precision(gpu=True) == 'bf16'


@pytest.mark.parametrize('name', FORMATS)
def test_flags_include_those_of_upstream_and_of_the_formats(name: str) -> None:
    args = parsed(*bench().training_flags(name))
    kept = PRECISIONS['bf16' if name == AGAIN else name]
    assert ('fp8' if args.fp8_param_gather else 'fp16' if args.fp16 else 'bf16') == kept.compute
    master = 'fp8' if args.sparse_ckpt_fp8_masters else args.main_params_dtype
    moments = (kept.master, kept.first_moment, kept.second_moment)
    assert (master, args.exp_avg_dtype, args.exp_avg_sq_dtype) == moments
    assert args.seed == (4321 if name == AGAIN else 1234)


KILLED_AT = [11.5, 22.5]


def logged(with_guest_s: float) -> Iterator[Iteration]:
    """One second an iteration until the node is lost; each recovery takes two more."""
    time = 0.0
    for number in range(1, 31):
        time += {11: 3.5, 20: 2.0 + with_guest_s}.get(number, 1.0 if number < 20 else with_guest_s)
        yield Iteration(time, number, 1000.0, 5.0)


def test_last_lines_compare_with_the_same_job_before() -> None:
    found = {}
    for way, with_guest_s in ((ROUTES, 1.25), (GUESTS, 2.0)):
        log = RunLog([list(logged(with_guest_s))], [])
        found[way] = lived(log, KILLED_AT, [])
        assert (found[way].fault_free_s, found[way].guest_s) == (1.0, with_guest_s)
        assert found[way].spare_seconds == 2.0
        assert found[way].seconds == log.iterations[19].time - KILLED_AT[1]
    bench = GuestsBench(Namespace(device=0.3), Path(), Path())
    notes = bench.summary(HARDWARE, [found]).notes
    assert notes[1:] == ['routes: iteration=1.25 guests=2.00', 'guests: seconds=1.12']


def test_last_line_compares_the_hot_spare_with_plain_megatron() -> None:
    plain, torchrun, spare = Start(10.0, 9.0, 2000), Start(9.5, 8.0, 1500), Start(9.0, 6.3, 1000)
    bench = StartBench(Namespace(), Path(), Path())
    report = bench.summary(HARDWARE, [{ALONE: plain, TORCHRUN: torchrun, SPARE: spare}])
    assert report.notes == ['start: seconds=0.90 cpu=0.70 memory=0.50']
