# SPDX-License-Identifier: Apache-2.0
"""The comparison, and that with other projects: rows, trace, arithmetic, table."""

import os
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest

from megatron.moevement.arguments import config_from_args
from tests.unit.tools.samples import HARDWARE, logged
from tools.bench.frame import Report
from tools.compare import __main__ as compare
from tools.compare import measuring
from tools.compare.__main__ import CompareBench
from tools.compare.peers import PEERS, RANKS, SITE, Watched, compared
from tools.compare.rows import ROWS, Keeps
from tools.compare.running import Course, Lived
from tools.lab.cpu_clock import Spent
from tools.lab.digests import StateDigest
from tools.lab.drawing import OWN, PALETTE
from tools.lab.job import Trained
from tools.lab.programs import LabError
from tools.lab.trainer import FOLDER
from tools.lab.trainer_flags import trainer_parser

VALUES = {'window': '3', 'mtbf_s': 60.0, 'network_gb_per_s': 0.02, 'disk': '/disk'}
SAME, OTHER = StateDigest('00', 8, {}), StateDigest('11', 8, {'0': {'parameter/x': '1'}})


# ---- rows


def flags_of(name: str) -> list[str]:
    return ROWS[name].training_flags(Path('/folder'), Path('/memory'), 6, **VALUES)


@pytest.mark.parametrize('name', ROWS)
def test_the_trainer_takes_the_flags_of_a_row(name: str) -> None:
    flags = flags_of(name)
    parsed, unknown = trainer_parser().parse_known_args(flags)
    assert not [flag for flag in unknown if flag.startswith('--sparse-ckpt')]
    config_from_args(parsed)  # refuses what has no use
    assert ('--sparse-ckpt' in flags) == (ROWS[name].keeps is Keeps.MEMORY)
    assert not any('{' in flag for flag in flags)


# ---- arithmetic


PLAIN = logged(*((float(number), number) for number in range(1, 11)))
"""Ten iterations of a second."""
ROLLED_BACK = logged(
    (1, 1), (2, 2), (3, 3), (4, 4), (5, 5),  # at 5.5 all is killed, the newest checkpoint is of 3
    (9, 4), (10, 5), (11, 6), (12, 7), (13, 8), (14, 9), (15, 10),
)  # fmt: skip
RESTARTED = Lived(Trained(ROLLED_BACK, SAME, []), [5.5], [0.0, 0.5, 7.5], 4000)
COURSE = Course(Path(), Path(), 12, 0, 4, 3, 'auto', fork=True)


def test_figures_are_relative_to_plain_megatron() -> None:
    found = measuring.figures(
        ROWS['torch-dist-sync'], RESTARTED, Lived(Trained(PLAIN, OTHER, [])), COURSE
    )
    assert (found.ratio, found.iteration_s, found.recovery_s) == (1.0, 1.0, 5.5)
    assert (found.ettr, found.ettr_warm) == (9 / 14, 9 / 12)
    assert found.again == 4.0, 'two iterations on two stages'
    assert (found.period, found.mbytes, found.bits) == (3, 4000 / 4 / 3 / 1e6, 'parameter')
    with pytest.raises(LabError, match='fewer than two'):
        measuring.span_s(logged((1, 1)))


# ---- report


def test_only_a_broken_promise_fails() -> None:
    flags = ['--quick', '--rows', 'torch-dist-sync,localized']
    bench = CompareBench(CompareBench.parse(flags), Path(), Path())
    plain, equal = Lived(Trained(PLAIN, OTHER, [])), Lived(Trained(ROLLED_BACK, OTHER, []), [5.5])
    dense = measuring.figures(ROWS['torch-dist-sync'], RESTARTED, plain, COURSE)
    for job, broken in ((equal, []), (RESTARTED, ['localized'])):
        own = measuring.figures(ROWS['localized'], job, plain, COURSE)
        found = bench.summary(HARDWARE, [{'torch-dist-sync': dense, 'localized': own}])
        assert found.different == broken
    assert found.notes[-1] == 'MoEvement, localized: the final state differs in parameter, rank.'
    assert found.ways['torch-dist-sync'].title == 'torch_dist, synchronous *'


def test_iterations_that_were_trained_again_count_for_nothing() -> None:
    curves = measuring.curves(RESTARTED)
    found = measuring.goodput(curves, 1.0, 2.0)
    # Iterations 1 to 3 end at 0, 1, 2 s; 4 to 10 at 8 to 14 s.
    assert found.tolist() == [1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0]
    assert curves.faults == [4.5]


def test_picture_separates_strategies_that_lose_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(__file__).parents[4] / 'docs' / 'measurements' / 'compare.json'
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    rounds = msgspec.convert(report.rounds, list[dict[str, measuring.RowRun]])
    axes = MagicMock()
    monkeypatch.setattr(compare, 'picture', lambda *_, **__: nullcontext(axes))
    drawn = msgspec.structs.replace(report, rounds=rounds)
    CompareBench.draw(Namespace(plot=Path()), drawn)
    colors = {call.args[0]: call.kwargs['color'] for call in axes.barh.call_args_list}
    lossy = sum(ROWS[name].lossy for name in report.ways)
    assert lossy == 3 and len(colors) == len(report.ways)
    assert [colors[place] for place in sorted(colors)][-lossy:] == 3 * [PALETTE[1]]
    assert {*[colors[place] for place in sorted(colors)][:-lossy]} == {OWN}
    assert axes.set_yticks.call_args.args[1][-1] == 'MoEtion v1'


@pytest.mark.parametrize('name', PEERS)
def test_only_a_peer_sees_the_folder_of_peers(name: str, tmp_path: Path) -> None:
    row = PEERS[name]
    launch = row.launch(tmp_path, tmp_path, [])
    assert launch.world_size == RANKS
    inside = str(SITE) in launch.environment()['PYTHONPATH'].split(os.pathsep)
    assert inside == (not row.ours)
    assert (FOLDER in launch.environment()) == name.startswith('lm-')
    assert ('--sparse-ckpt' in launch.flags) == row.ours


def ran(total_s: float, training_s: float, memory: int, killed: float | None) -> Watched:
    one = Watched()
    one.began, spent = -7.0, Spent(0.0, 0.75, 0.5)
    one.samples = [spent, Spent(4.0, 1.0, 1.0), Spent(12.0, 1.0 + total_s, 1.0 + training_s)]
    one.memory, one.tmpfs, one.logs, one.killed = memory, 3_000_000, 1_000_000, killed
    return one


ALONE = Trained(logged(*((float(number), number) for number in range(1, 17))), SAME, [])


def test_figures_of_peers_are_relative_to_plain_megatron() -> None:
    times = [(2.0 * number, number) for number in range(1, 13)]
    job = Trained(logged(*times, (30.0, 12), (31.0, 13)), OTHER, [])
    found = compared(ran(4.0, 2.5, 9_000_000, 24.5), job, ran(2.0, 2.0, 4_000_000, None), ALONE,
                     [0.0, 27.5])  # fmt: skip
    assert (found.ratio, found.cpu, found.cpu_training) == (2.0, 2.0, 1.25)
    assert (found.back_s, found.start_s, found.again) == (6.5, 3.0, 1)
    assert (found.tmpfs_mb, found.logs_mb, found.memory_mb) == (3.0, 1.0, 5.0)
    assert (found.up_s, found.up_cpu_s) == (9.0, 0.75)
    assert found.different
    with pytest.raises(LabError, match='never got beyond iteration 12'):
        compared(ran(4, 2, 0, 24.5), Trained(logged(*times, (30.0, 12)), SAME, []),
                 ran(2, 2, 0, None), ALONE, [])  # fmt: skip


def test_most_pages_of_any_moment_count(tmp_path: Path) -> None:
    one, file, log = Watched(), tmp_path / 'window', tmp_path / 'upstream-log'
    log.write_bytes(bytes(4096))
    for pages in (1, 3, 2):
        file.write_bytes(bytes(4096 * pages))
        one._sample(tmp_path)
    assert (one.tmpfs, one.logs) == (3 * 4096, 4096)
