# SPDX-License-Identifier: Apache-2.0
"""The benchmark of frozen operators: that it measures what it says, not how long that takes."""

import multiprocessing
from multiprocessing.connection import Connection

import msgspec
import pytest

from tools.bench.frozen import FrozenReport, Shape, main, measure

TINY = Shape(layers=1, hidden=16, experts=4, sequence=8, micro_batch=1, rounds=2)


def _measure(pipe: Connection) -> None:
    pipe.send_bytes(msgspec.json.encode(measure(TINY)))


@pytest.mark.timed
def test_each_set_of_operators_is_measured_beside_none() -> None:
    """In a process of its own, which has process groups and patches of its own."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context('forkserver')
    process = context.Process(target=_measure, args=(theirs,))
    process.start()
    theirs.close()
    report = msgspec.json.decode(ours.recv_bytes(), type=FrozenReport)
    process.join()
    sets = ['none', 'half of the experts', 'all experts', 'all operators']
    assert list(report.over_none) == sets
    assert report.over_none['none'].text() == '1.00'
    assert all(spread.min > 0 for spread in report.over_none.values())
    assert 0 < report.expert_share < 1


def test_a_bad_shape_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match='2'):
        main(['--experts', '0'])
    assert '--experts 0: must be at least 1' in capsys.readouterr().err
