# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks of a job, and the jobs of the found windows, have equal settings.

Checked at the start of a job, and when a replacement process starts, before it copies state from
other ranks, or takes part in a replay.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from torch.distributed import Store

from moevement_ext.config import slurm_run_id
from moevement_ext.errors import UserError
from moevement_ext.logger import logger_of
from moevement_ext.membership.counters import lives
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import Rendezvous, present_round, report_of
from moevement_ext.membership.rendezvous_runner import waiting_survivor
from moevement_ext.membership.report import Report, decode_all
from moevement_ext.memory.window import settings
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.memory.window.settings import RunSettings, differences, first_lines
from moevement_ext.recover.inventory import Inventory, launch_of

logger = logger_of(__name__)

_ALIKE = 'with the same flags, files, versions and environment.'
REMEDY = f'Launch it {_ALIKE}'
_STRICT = '--sparse-ckpt-strict'
_KEY = 'launched'
_SETTINGS = 'settings'


_LAUNCHED = msgspec.msgpack.Decoder(tuple[str, str, bytes])


def check(rank: Rank, inventories: Sequence[Inventory]) -> list[str]:
    """Check that settings agree; report differences by name, with both values. Collective.

    Returns the reasons for which found windows are refused. Raises `UserError` if ranks differ
    in settings that decide bits, or, with `--sparse-ckpt-strict`, in any settings, and if a job of
    Slurm that names no run has windows of another one.
    """
    if len({inventory.settings for inventory in inventories}) > 1:
        own = settings.encode(rank.identity.settings)
        launched = [settings.decode(item) for item in rank.exchange('settings', own)]
        differing = _among_ranks(dict(enumerate(launched)), rank.config.strict)
        if differing and rank.number == 0:
            logger.warning(
                'bits of a recovery may differ, as ranks have other settings than rank 0: %s',
                first_lines(differing),
            )
    refused = _union(inventory.refused for inventory in inventories)
    doubtful = _union(inventory.doubtful for inventory in inventories)
    if (refused or doubtful) and rank.config.strict:
        raise UserError(
            f'{_STRICT}: windows of the run {rank.run_id} are of another launch: '
            f'{first_lines([*refused, *doubtful])}. Launch the job as before, give another '
            f'--sparse-ckpt-run-id, or leave {_STRICT} out.'
        )
    if refused and rank.run_id == slurm_run_id() and not rank.config.forget:
        raise UserError(
            f'windows of the run {rank.run_id} are of another launch in this job of Slurm: '
            f'{first_lines(refused)}. Give each its own --sparse-ckpt-run-id; --sparse-ckpt-forget '
            'starts over, and overwrites them.'
        )
    if doubtful and rank.number == 0:
        logger.warning(
            'bits may differ from the earlier run, as windows are of another launch: %s',
            first_lines(doubtful),
        )
    return refused


def check_ranks(store: Store, reports: Sequence[Report], identity: RankIdentity) -> None:
    """Refuse ranks with other settings than rank 0, before any of the settings takes effect.

    Collective at the start of a job, over `store` of the round; one rank reports for all ranks
    with equal settings. Raises `UserError` on all ranks.
    """
    first = dict[str, int]()
    for number, report in enumerate(reports):
        first.setdefault(report.launched, number)
    if len(first) == 1:
        return
    if identity.rank in first.values():
        store.set(f'{_SETTINGS}/{identity.rank}', settings.encode(identity.settings))  # type: ignore[arg-type]
    launched = {one: settings.decode(store.get(f'{_SETTINGS}/{one}')) for one in first.values()}
    _among_ranks(launched, strict=False)


def refuse_stranger(place: Rendezvous, identity: RankIdentity, strict: bool) -> None:
    """Refuse this process before it takes the place of a rank of a job with other settings.

    Raises `UserError` if that job lives; otherwise it is an earlier one.
    """
    store = place.store
    number = present_round(store)
    found = report_of(store, number, place.rank) or report_of(store, number, 0)
    if found is None or decode_all([found])[0].launched == launch_of(identity):
        return
    if waiting_survivor(place) is not None or lives(store):
        reason = why_not(store, [], identity, strict)
        if reason is not None:
            raise UserError(f'{reason}. {REMEDY} Another job needs another --master-port.')


def leave(store: Store, identity: RankIdentity) -> None:
    """Have rank 0 store the job's settings, for processes that start later."""
    if identity.rank != 0:
        return
    encoded = settings.encode(identity.settings)
    left = msgspec.msgpack.encode((identity.run, identity.topology, encoded))
    store.set(_KEY, left)  # type: ignore[arg-type]


def why_not(
    store: Store, reports: Sequence[Report], identity: RankIdentity, strict: bool
) -> str | None:
    """Return the reason why a new process must not join a running job; None if it may.

    `strict` also refuses differences that may decide bits; otherwise they cause a warning.
    `store` is that of `leave`.
    """
    own = launch_of(identity)
    if own in {report.launched for report in reports if report.survivor}:
        return None
    words = 'the job', f'rank {identity.rank}'
    if not store.check([_KEY]):
        return f'rank {identity.rank} has other settings than the job'
    run, topology, encoded = _LAUNCHED.decode(store.get(_KEY))
    found = differences(settings.decode(encoded), identity.settings, words, of_one_job=True)
    decisive = found.decisive
    if not decisive:  # a custom training loop may report digests only
        digests = ('run', run, identity.run), ('layout', topology, identity.topology)
        decisive = [
            f'digest of the {what}: {words[0]} {there}, {words[1]} {here}'
            for what, there, here in digests
            if there != here
        ]
    if decisive or (found.doubtful and strict):
        flag = '' if decisive else f'{_STRICT}: '
        lines = first_lines([*decisive, *found.doubtful])
        return f'{flag}rank {identity.rank} has other settings than the job it joins: {lines}'
    if found.doubtful:
        logger.warning(
            'bits may differ, as rank %d has other settings than the job it joins: %s',
            identity.rank,
            first_lines(found.doubtful),
        )
    return None


def _among_ranks(launched: Mapping[int, RunSettings], strict: bool) -> list[str]:
    """Differences from rank 0's settings that may change bits; raises `UserError` for others.

    With `strict` for these, too. Of ranks with the same difference only the first is named.
    """
    found: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for number, other in launched.items():
        compared = differences(launched[0], other, ('rank 0', '\0'), of_one_job=True)
        for kind, lines in zip(found, compared, strict=True):
            for line in lines:
                kind.setdefault(line, line.replace('\0', f'rank {number}'))
    decisive, doubtful = (list(kind.values()) for kind in found)
    if decisive or (doubtful and strict):
        raise UserError(
            f'{"" if decisive else f"{_STRICT}: "}ranks of this job have other settings than '
            f'rank 0: {first_lines([*decisive, *doubtful])}. Launch all {_ALIKE}'
        )
    return doubtful


def _union(lists: Iterable[Iterable[str]]) -> list[str]:
    return sorted({line for lines in lists for line in lines})
