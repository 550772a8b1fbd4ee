# SPDX-License-Identifier: Apache-2.0
"""What training's traffic and replication cost each other: a small run of all parts, and flags."""

import os
from pathlib import Path

import pytest

from tools.bench import link_share
from tools.bench.link_share import Bench


@pytest.mark.timed
def test_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(
        rounds=1, iterations=16, micro_batches=1, message_mib=1, compute_s=0.001, ranks=2,
        slot_mib=1, held_gb_per_s=1.0,
    )  # fmt: skip
    before = set(Path('/dev/shm').glob('link-share-*'))
    kinds = link_share.measure(bench).kinds
    assert list(kinds) == ['none', 'off', 'auto', 'held']
    assert kinds['none'].ratio == kinds['none'].slow_ratio == 1.0
    assert all(0 < kind.iteration_s.min and 0 < kind.slow_exchange_s for kind in kinds.values())
    assert not set(Path('/dev/shm').glob('link-share-*')) - before


def test_ratios_are_those_of_whole_iterations_and_of_slow_exchanges() -> None:
    alone = [[0.1] * 20, [0.1] * 20]
    busy = [[0.1] * 18 + [0.5] * 2, [0.1] * 20]
    found = link_share._kind(busy, alone, skipped=3)
    assert (found.iteration_s.min, found.skipped_windows) == (pytest.approx(2.0), 3)
    assert found.ratio == pytest.approx((2.0 + 2.8) / 2 / 2.0)
    assert found.slow_ratio == pytest.approx(0.48 / 0.1)


@pytest.mark.parametrize(
    ('flag', 'value', 'rule'),
    [
        ('--rounds', '0', 'at least 1'),
        ('--iterations', '12', '16, 24'),
        ('--held', '0.01', 'at least 0.02'),
        ('--link-gbit', '0', 'above 0'),
    ],
)
def test_wrong_values_are_refused_in_one_line(
    flag: str, value: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        link_share.main([flag, value])
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and f'{flag} {value}: must be {rule}' in line


def test_a_link_that_cannot_be_made_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    assert link_share.main(['--link-gbit', '2']) == 2
    assert capsys.readouterr().err == 'link_share: --link-gbit needs root and iproute2\n'
