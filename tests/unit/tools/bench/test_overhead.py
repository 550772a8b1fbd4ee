# SPDX-License-Identifier: Apache-2.0
"""The benchmark of overhead: its variants, and its ratios over the rounds."""

import json
from pathlib import Path

import pytest

from tests.unit.tools.samples import HARDWARE
from tools.bench import model, overhead
from tools.lab.figures import Spread
from tools.lab.launch import Launch


def run_of(variant: str, iteration_s: float, digest: str = 'same') -> overhead.Run:
    dense = variant == overhead.DENSE_IN_MEMORY
    return overhead.Run(
        variant=variant,
        iteration_s=iteration_s,
        all_iterations_s=[iteration_s],
        cpu_s=2 * iteration_s,
        exposed_ms=1.0 if dense or variant == overhead.SPARSE else None,
        windows=[1] if dense else [2],
        slot_bytes=[100] if dense else [70, 50],
        digest=digest,
    )


def overhead_report(*sparse_s: float, digest: str = 'same') -> overhead.OverheadReport:
    """One round for each time of the sparse variant; round n of the others takes n seconds."""
    bench = overhead.Bench(Path(), Path(), 2, 14, 4, 'auto')
    rounds = [
        [
            run_of(name, seconds if name == overhead.SPARSE else number, digest='same')
            for name in bench.variants
        ]
        for number, seconds in enumerate(sparse_s, 1)
    ]
    rounds[0][0] = run_of(overhead.PLAIN, 1.0, digest)
    return overhead.summarize(bench, HARDWARE, rounds)


def test_ratios_are_taken_within_a_round() -> None:
    report = overhead_report(1.5, 2.2, 6.0)
    ratio = report.variants[overhead.SPARSE].ratio
    assert ratio.min == pytest.approx(1.1)
    assert ratio.median == pytest.approx(1.5)
    assert ratio.max == pytest.approx(2.0)
    assert report.variants[overhead.PLAIN].ratio == Spread(1, 1, 1)


def test_slots_are_compared_with_a_window_of_one_slot() -> None:
    slots = overhead_report(1.0).slot_bytes
    assert (slots.dense, slots.mean, slots.max) == (100, 60, 70)
    assert slots.mean_over_dense == pytest.approx(0.6)
    assert slots.max_over_dense == pytest.approx(0.7)


@pytest.mark.parametrize(('digest', 'identical'), [('same', True), ('other', False)])
def test_runs_that_end_differently_are_noticed(digest: str, identical: bool) -> None:
    assert overhead_report(1.0, digest=digest).identical is identical


def test_exit_status_says_whether_the_runs_are_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for digest, status in (('same', 0), ('other', 1)):
        report = overhead_report(1.0, digest=digest)
        monkeypatch.setattr(overhead, 'measure', lambda *_, found=report: found)
        assert overhead.main(['--json', str(tmp_path / 'o.json')]) == status
        assert json.loads((tmp_path / 'o.json').read_text())['identical'] is (status == 0)


@pytest.mark.parametrize(
    'flags',
    [
        ['--ranks', '3'],
        ['--rounds', '0'],
        ['--iterations', '5'],
        ['--window', 'some'],
        ['--against', '/nowhere'],
    ],
)
def test_wrong_flags_of_overhead_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        overhead.parse_arguments(flags)
    assert refused.value.code == 2


def test_every_variant_but_plain_adds_flags() -> None:
    bench = overhead.Bench(Path('data'), Path('out'), 2, 14, 4, 'auto')
    added = {
        name: bench._protection(name, Path('/m'), Path('/c'), Path('/e'))
        for name in overhead.TITLES
    }
    assert added.pop(overhead.PLAIN) == []
    assert added.pop(overhead.AGAINST) == added[overhead.SPARSE]
    assert len({tuple(flags) for flags in added.values()}) == 5
    assert all(flags for flags in added.values())
    assert added[overhead.DISK][: len(added[overhead.SPARSE])] == added[overhead.SPARSE]


@pytest.mark.parametrize(('ranks', 'stages'), [(2, '1'), (4, '2')])
def test_ranks_are_two_per_stage(ranks: int, stages: str) -> None:
    flags = model.training_flags(Path('data'), ranks, 10, Path('digest.json'))
    assert flags[flags.index('--pipeline-model-parallel-size') + 1] == stages
    assert flags[flags.index('--expert-model-parallel-size') + 1] == '2'


def test_another_checkout_takes_its_turn_after_ours(tmp_path: Path) -> None:
    bench = overhead.Bench(Path(), Path(), 2, 14, 4, 'auto')
    assert overhead.AGAINST not in bench.variants
    both = bench._replace(against=tmp_path).variants
    assert both[both.index(overhead.SPARSE) + 1] == overhead.AGAINST
    assert [name for name in both if name != overhead.AGAINST] == bench.variants


def test_a_launch_of_another_checkout_finds_only_its_modules(tmp_path: Path) -> None:
    launch = Launch(tmp_path, ['--flag'], 1, 1, checkout=tmp_path / 'before')
    assert launch.program() == [str(tmp_path / 'before' / 'pretrain_gpt.py'), '--flag']
    assert launch.environment()['PYTHONPATH'].split(':')[0] == str(tmp_path / 'before')
