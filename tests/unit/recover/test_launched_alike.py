# SPDX-License-Identifier: Apache-2.0
"""A difference between ranks, or to the launch that captured windows, is told by name."""

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from torch.distributed import HashStore

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import UserError
from moevement_ext.membership.report import Report
from moevement_ext.memory.window import settings
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.settings import RunSettings, differences
from moevement_ext.recover import launched_alike
from moevement_ext.recover.absence import Traces
from moevement_ext.recover.inventory import Inventory, launch_of

OWN = RunSettings({'--seed': '1'}, environment={'NCCL_ALGO': 'Ring'})
OTHER_SEED = replace(OWN, flags={'--seed': '2'})
OTHER_RINGS = replace(OWN, environment={})


def check(*launched: RunSettings, strict: bool = False, **found: Any) -> list[str]:
    rank = SimpleNamespace(
        number=0,
        run_id='run',
        identity=SimpleNamespace(settings=launched[0]),
        config=SparseCheckpointConfig(strict=strict),
        exchange=lambda name, own: [settings.encode(one) for one in launched],
    )
    inventories = [
        Inventory([], [], Traces('node0', -1, False), settings=settings.digest_of(one))
        for one in launched
    ]
    inventories[-1] = replace(inventories[-1], **found)
    return launched_alike.check(rank, inventories)  # type: ignore[arg-type]


def test_ranks_that_are_launched_alike_need_not_ask() -> None:
    assert check(OWN, OWN) == []


@pytest.mark.parametrize('strict', [False, True])
def test_another_seed_of_a_rank_is_refused(strict: bool) -> None:
    with pytest.raises(UserError, match='than rank 0: --seed: rank 0 1, rank 1 2. Launch'):
        check(OWN, OTHER_SEED, OTHER_SEED, strict=strict)


def test_another_environment_of_a_rank_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert check(OWN, OWN, OTHER_RINGS) == []
    assert 'NCCL_ALGO: rank 0 Ring, rank 2 absent' in caplog.text
    with pytest.raises(UserError, match='--sparse-ckpt-strict: .*NCCL_ALGO: rank 0 Ring, rank 2'):
        check(OWN, OWN, OTHER_RINGS, strict=True)


def test_windows_of_another_launch_are_said(caplog: pytest.LogCaptureFixture) -> None:
    found = {'refused': ['--lr: was 1, is 2'], 'doubtful': ['torch: was 2, is 3']}
    with caplog.at_level(logging.WARNING):
        assert check(OWN, OWN, **found) == ['--lr: was 1, is 2']
    assert 'another launch: torch: was 2, is 3' in caplog.text
    with pytest.raises(UserError, match='--lr: was 1, is 2; torch: was 2, is 3. Launch the job as'):
        check(OWN, OWN, strict=True, **found)


def started(*windows: str) -> list[str]:
    """What is said to each rank of a job whose ranks are launched with these windows."""
    store = HashStore()
    launched = [replace(OWN, protection={'--sparse-ckpt-window': one}) for one in windows]
    identities = [RankIdentity('run', 'layout', n, one) for n, one in enumerate(launched)]
    reports = [Report(False, 'a', 1, [], launched=launch_of(one)) for one in identities]

    def said(identity: RankIdentity) -> str:
        try:
            launched_alike.check_protection(store, reports, identity)
        except UserError as error:
            return str(error)
        return ''

    with ThreadPoolExecutor(len(windows)) as ranks:  # each waits for what others say
        return list(ranks.map(said, identities))


def test_ranks_that_are_protected_alike_are_told_nothing() -> None:
    assert started('3', '3', '3') == ['', '', '']


def test_all_ranks_hear_of_one_that_is_protected_otherwise() -> None:
    assert started('3', 'auto', 'auto') == 3 * [
        'ranks of this job are launched otherwise than rank 0: --sparse-ckpt-window: rank 0 3, '
        'rank 1 auto. Launch all with the same flags.'
    ]


def test_windows_of_a_launch_that_was_protected_otherwise_are_good() -> None:
    assert not differences(OWN, replace(OWN, protection={'--sparse-ckpt-window': '3'}))


def test_what_differs_from_node_to_node_is_no_matter() -> None:
    one = SparseCheckpointConfig(window=3, dir='/a', disk='/b', events='/c', metrics=9000)
    other = SparseCheckpointConfig(window=3, dir='/d', disk='/e', topology='/f', strict=True)
    assert one.of_all_ranks() == other.of_all_ranks()
    without = SparseCheckpointConfig(window=4, dir='/a')
    differing = dict(one.of_all_ranks().items() ^ without.of_all_ranks().items())
    assert differing.keys() == {'--sparse-ckpt-window', '--sparse-ckpt-disk'}


def joined_by(*joining: RunSettings, run: str = 'run', strict: bool = False) -> list[str | None]:
    """What is said to each new process of a job that `OWN` launched."""
    store = HashStore()
    first = RankIdentity('run', 'layout', 0, OWN)
    launched_alike.leave(store, first)
    reports = [Report(True, 'a', 1, [], launched=launch_of(first)), Report(False, 'b', 2, [])]
    identities = [RankIdentity(run, 'layout', 1, one) for one in joining]
    return [launched_alike.why_not(store, reports, one, strict) for one in identities]


def test_who_joins_a_job_that_is_launched_alike_is_welcome() -> None:
    assert joined_by(OWN) == [None]


def test_who_joins_with_other_flags_is_told_which() -> None:
    assert joined_by(OTHER_SEED) == [
        'rank 1 is launched otherwise than the job it joins: --seed: the job 1, rank 1 2'
    ]


def test_who_joins_with_other_protection_is_told_which() -> None:
    other = replace(OWN, protection={'--sparse-ckpt-recovery': 'global'})
    assert joined_by(other) == [
        'rank 1 is launched otherwise than the job it joins: --sparse-ckpt-recovery: the job '
        'absent, rank 1 global'
    ]


def test_a_loop_that_gives_digests_alone_is_told_of_these() -> None:
    assert joined_by(OWN, run='other') == [
        'rank 1 is launched otherwise than the job it joins: digest of the run: the job run, '
        'rank 1 other'
    ]


def test_who_joins_in_another_environment_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert joined_by(OTHER_RINGS) == [None]
    assert 'NCCL_ALGO: the job Ring, rank 1 absent' in caplog.text
    assert joined_by(OTHER_RINGS, strict=True) == [
        '--sparse-ckpt-strict: rank 1 is launched otherwise than the job it joins: NCCL_ALGO: the '
        'job Ring, rank 1 absent'
    ]


def test_it_is_refused_also_where_nothing_says_how_the_job_was_launched() -> None:
    survivor = Report(True, 'a', 1, [], launched='digest')
    identity = RankIdentity('run', 'layout', 1, OWN)
    said = launched_alike.why_not(HashStore(), [survivor], identity, strict=False)
    assert said == 'rank 1 is launched otherwise than the job'
