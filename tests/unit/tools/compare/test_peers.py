# SPDX-License-Identifier: Apache-2.0
"""Other projects beside this one: what is started, measured and said."""

import os
from pathlib import Path

import pytest

from tests.unit.tools.samples import logged
from tools.compare.peers import PEERS, RANKS, SITE, Watched, compared
from tools.lab.cpu_clock import Spent
from tools.lab.digests import StateDigest
from tools.lab.job import Trained
from tools.lab.programs import LabError
from tools.lab.trainer import FOLDER

SAME, OTHER = StateDigest('00', 8, {}), StateDigest('11', 8, {'0': {'parameter/x': '1'}})


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


PLAIN = Trained(logged(*((float(number), number) for number in range(1, 17))), SAME, [])


def test_figures_are_relative_to_plain_megatron() -> None:
    times = [(2.0 * number, number) for number in range(1, 13)]
    job = Trained(logged(*times, (30.0, 12), (31.0, 13)), OTHER, [])
    found = compared(ran(4.0, 2.5, 9_000_000, 24.5), job, ran(2.0, 2.0, 4_000_000, None), PLAIN,
                     [0.0, 27.5])  # fmt: skip
    assert (found.ratio, found.cpu, found.cpu_training) == (2.0, 2.0, 1.25)
    assert (found.back_s, found.start_s, found.again) == (6.5, 3.0, 1)
    assert (found.tmpfs_mb, found.logs_mb, found.memory_mb) == (3.0, 1.0, 5.0)
    assert (found.up_s, found.up_cpu_s) == (9.0, 0.75)
    assert found.different
    with pytest.raises(LabError, match='never got beyond iteration 12'):
        compared(ran(4, 2, 0, 24.5), Trained(logged(*times, (30.0, 12)), SAME, []),
                 ran(2, 2, 0, None), PLAIN, [])  # fmt: skip


def test_most_pages_of_any_moment_count(tmp_path: Path) -> None:
    one, file, log = Watched(), tmp_path / 'window', tmp_path / 'upstream-log'
    log.write_bytes(bytes(4096))
    for pages in (1, 3, 2):
        file.write_bytes(bytes(4096 * pages))
        one._look(tmp_path)
    assert (one.tmpfs, one.logs) == (3 * 4096, 4096)
