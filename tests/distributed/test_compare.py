# SPDX-License-Identifier: Apache-2.0
"""The comparison as a program: few rows, real jobs, real failures."""

from pathlib import Path

import msgspec
import pytest

from tools.compare.__main__ import main
from tools.compare.report import Comparison
from tools.compare.rows import ROWS, Keeps
from tools.compare.running import STATE_BYTES

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]
_ROWS = ('none', 'torch-dist-sync', 'whole-job', 'localized', 'copy')


def test_rows_of_each_kind_survive_the_same_failures(tmp_path: Path) -> None:
    target = tmp_path / 'compare.json'
    flags = [
        '--quick',
        '--iterations',
        '32',
        '--interval',
        '4',
        '--window',
        '1',
        '--rows',
        ','.join(_ROWS),
    ]
    flags += ['--output', str(tmp_path), '--json', str(target), '--plot', str(tmp_path)]
    assert main(flags) == 0
    found = msgspec.json.decode(target.read_bytes(), type=Comparison)
    assert list(found.rows) == list(_ROWS)
    assert not found.not_run
    assert found.exact
    for name, row in found.rows.items():
        assert len(row.curves.faults) == 2
        assert row.ettr.median < 1
        if ROWS[name].keeps is Keeps.MEMORY:
            assert row.bytes > 0
            assert row.again >= 0
            assert row.predicted is not None
    assert found.rows['none'].again > found.rows['whole-job'].again
    assert found.rows['localized'].bytes == pytest.approx(STATE_BYTES, rel=0.1)
    assert found.rows['none'].curves.validated == found.plain.validated
    assert len(list(tmp_path.glob('compare-*.png'))) == 3
