# SPDX-License-Identifier: Apache-2.0
"""A difference between ranks, or to the launch that captured windows, is told by name."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from torch.distributed import HashStore

from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.errors import UserError
from moevement_ext.membership import counters, exchange
from moevement_ext.membership.counters import place_in, send_heartbeat
from moevement_ext.membership.rendezvous import Rendezvous, is_broken, present_round
from moevement_ext.membership.report import Report, encode
from moevement_ext.memory.window import settings
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.settings import RunSettings, differences
from moevement_ext.recover import launched_alike
from moevement_ext.recover.absence import Traces
from moevement_ext.recover.inventory import Inventory, launch_of

OWN = RunSettings({'--seed': '1'}, environment={'NCCL_ALGO': 'Ring'})
OTHER_SEED = replace(OWN, flags={'--seed': '2'})
OTHER_RINGS = replace(OWN, environment={})


def check(
    *launched: RunSettings,
    strict: bool = False,
    run: str = 'run',
    forget: bool = False,
    **found: Any,
) -> list[str]:
    rank = SimpleNamespace(
        number=0,
        run_id=run,
        identity=SimpleNamespace(settings=launched[0]),
        config=SparseCheckpointConfig(strict=strict, forget=forget),
        exchange=lambda name, own: [settings.encode(one) for one in launched],
    )
    inventories = [
        Inventory(
            memory=[], disk=[], traces=Traces('node0', -1, []), settings=settings.digest_of(one)
        )
        for one in launched
    ]
    inventories[-1] = replace(inventories[-1], **found)
    return launched_alike.check(rank, inventories)  # type: ignore[arg-type]


def test_ranks_with_equal_settings_exchange_nothing() -> None:
    assert check(OWN, OWN) == []


@pytest.mark.parametrize('strict', [False, True])
def test_different_seed_of_a_rank_is_refused(strict: bool) -> None:
    with pytest.raises(UserError, match='than rank 0: --seed: rank 0 1, rank 1 2. Launch'):
        check(OWN, OTHER_SEED, OTHER_SEED, strict=strict)


def test_windows_of_another_launch_in_a_job_of_slurm_are_not_trained_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second seed in one allocation, which names no run, ended the windows of the first."""
    monkeypatch.setenv('SLURM_JOB_ID', '77')
    refused = ['--seed: was 1, is 2']
    with pytest.raises(UserError, match='--seed: was 1, is 2. Give each its own --sparse-ckpt-run'):
        check(OWN, OWN, run='slurm-77', refused=refused)
    assert check(OWN, OWN, run='slurm-77', forget=True, refused=refused) == refused
    assert check(OWN, OWN, run='named', refused=refused) == refused


def started(*launched: RunSettings) -> list[str]:
    """What is said to each rank of a job whose ranks are launched with these settings."""
    store = HashStore()
    identities = [RankIdentity('run', 'layout', n, one) for n, one in enumerate(launched)]
    reports = [Report(False, 'a', 1, [], launched=launch_of(one)) for one in identities]

    def said(identity: RankIdentity) -> str:
        try:
            launched_alike.check_ranks(store, reports, identity)
        except UserError as error:
            return str(error)
        return ''

    with ThreadPoolExecutor(len(launched)) as ranks:  # each waits for what others say
        return list(ranks.map(said, identities))


def test_all_ranks_learn_of_a_rank_with_other_settings() -> None:
    other = replace(OWN, protection={'--sparse-ckpt-window': '3'})
    assert started(OWN, OTHER_RINGS, OWN) == ['', '', ''], 'it is told later'
    for rank, line in (
        (other, '--sparse-ckpt-window: rank 0 absent, rank 1 3'),
        (OTHER_SEED, '--seed: rank 0 1, rank 1 2'),
    ):
        assert started(OWN, rank, rank) == 3 * [
            f'ranks of this job have other settings than rank 0: {line}. '
            'Launch all with the same flags, files, versions and environment.'
        ]
    assert not differences(OWN, other), 'windows of such a launch are usable'


OTHER_RECOVERY = replace(OWN, protection={'--sparse-ckpt-recovery': 'global'})


@pytest.mark.parametrize(
    ('joining', 'run', 'strict', 'said'),
    [
        (OWN, 'run', False, None),
        (OTHER_SEED, 'run', False, '--seed: the job 1, rank 1 2'),
        (OTHER_RECOVERY, 'run', False, '--sparse-ckpt-recovery: the job absent, rank 1 global'),
        # A loop may pass digests only.
        (OWN, 'other', False, 'digest of the run: the job run, rank 1 other'),
        (OTHER_RINGS, 'run', False, None),
        (OTHER_RINGS, 'run', True, 'NCCL_ALGO: the job Ring, rank 1 absent'),
    ],
)
def test_joining_process_with_other_flags_is_refused_by_name(
    joining: RunSettings,
    run: str,
    strict: bool,
    said: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, first = HashStore(), RankIdentity('run', 'layout', 0, OWN)
    launched_alike.leave(store, first)
    reports = [Report(True, 'a', 1, [], launched=launch_of(first)), Report(False, 'b', 2, [])]
    identity = RankIdentity(run, 'layout', 1, joining)
    with caplog.at_level(logging.WARNING):
        reason = launched_alike.why_not(store, reports, identity, strict)
    flag = '--sparse-ckpt-strict: ' * strict
    words = f'{flag}rank 1 has other settings than the job it joins: {said}'
    assert reason == (None if said is None else words)
    doubtful = joining is OTHER_RINGS and not strict
    assert ('NCCL_ALGO: the job Ring, rank 1 absent' in caplog.text) is doubtful


@pytest.mark.parametrize('number', [1, 2])
def test_stranger_is_refused_before_it_takes_a_place(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, stopped = HashStore(), threading.Event()
    for one in (RankIdentity('run', 'layout', rank, OWN) for rank in range(2)):
        launched_alike.leave(store, one)
        report = Report(False, 'a', 1, [], launched=launch_of(one))
        store.set(place_in(0, one.rank), exchange.packed(encode(report)))  # type: ignore[arg-type]
    place = Rendezvous(store, number, 3)

    def live() -> None:
        while not stopped.wait(0.05):
            send_heartbeat(store, 0)

    living = threading.Thread(target=live)
    living.start()
    launched_alike.refuse_stranger(place, RankIdentity('run', 'layout', number, OWN), False)
    stranger = RankIdentity('run', 'layout', number, OTHER_SEED)
    with pytest.raises(UserError, match=f'--seed: the job 1, rank {number} 2. .* --master-port'):
        launched_alike.refuse_stranger(place, stranger, False)
    assert not is_broken(store, present_round(store))
    stopped.set()
    living.join()
    monkeypatch.setattr(counters, 'LONGEST_PERIOD_S', 0.0)
    launched_alike.refuse_stranger(place, stranger, False)


@pytest.mark.parametrize('launch', ['', 'gone'])
def test_only_a_survivor_of_this_launch_waits(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, 'LONGEST_PERIOD_S', 0.0)
    store = HashStore()
    launched_alike.leave(store, RankIdentity('run', 'layout', 0, OWN))
    waits = Report(True, 'a', 1, [], launched='as OWN', details=b'handed over', launch=launch)
    store.add('round', 1)
    store.set(place_in(1, 0), exchange.packed(encode(waits)))  # type: ignore[arg-type]
    stranger = RankIdentity('run', 'layout', 1, OTHER_SEED)
    place = Rendezvous(store, 1, 2)
    if launch:
        launched_alike.refuse_stranger(place, stranger, False)
        return
    with pytest.raises(UserError, match='--seed: the job 1, rank 1 2'):
        launched_alike.refuse_stranger(place, stranger, False)
