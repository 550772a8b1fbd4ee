# SPDX-License-Identifier: Apache-2.0
"""Are all ranks of a job, and the jobs whose windows they find, launched alike? At its start."""

import logging
from collections.abc import Iterable, Sequence

from moevement_ext.errors import UserError
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.window import settings
from moevement_ext.memory.window.settings import Differences, differences, told
from moevement_ext.recover.inventory import Inventory

logger = logging.getLogger(__name__)

_STRICT = '--sparse-ckpt-strict'


def check(rank: Rank, inventories: Sequence[Inventory]) -> list[str]:
    """Say by name, with both values, what differs. Collective.

    Args:
        rank: this rank.
        inventories: of all ranks.

    Returns:
        Why windows are refused that were found.

    Raises:
        UserError: ranks differ in what decides bits; or anything differs, and
            `--sparse-ckpt-strict` forbids that.
    """
    if len({inventory.settings for inventory in inventories}) > 1:
        _check_ranks(rank)
    refused = _union(inventory.refused for inventory in inventories)
    doubtful = _union(inventory.doubtful for inventory in inventories)
    if (refused or doubtful) and rank.config.strict:
        raise UserError(
            f'{_STRICT}: windows of the run {rank.run_id} are of another launch: '
            f'{told([*refused, *doubtful])}. Launch it as that was, give another '
            f'--sparse-ckpt-run-id, or leave {_STRICT} out.'
        )
    if doubtful and rank.number == 0:
        logger.warning(
            'sparse checkpointing: bits may differ from those before, as windows are of another '
            'launch: %s',
            told(doubtful),
        )
    return refused


def _check_ranks(rank: Rank) -> None:
    own = settings.encode(rank.identity.settings)
    found = _among_ranks([settings.decode(item) for item in rank.exchange('settings', own)])
    if found.decisive or (found and rank.config.strict):
        flag = '' if found.decisive else f'{_STRICT}: '
        raise UserError(
            f'{flag}ranks of this job are launched otherwise than rank 0: {told(found.lines)}. '
            'Launch all with the same flags, files, versions and environment.'
        )
    if found and rank.number == 0:
        logger.warning(
            'sparse checkpointing: bits of a recovery may differ, as ranks are launched otherwise '
            'than rank 0: %s',
            told(found.lines),
        )


def _among_ranks(launched: Sequence[settings.RunSettings]) -> Differences:
    """Each rank's from those of rank 0; of ranks with the same line the first is named."""
    found: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for number, other in enumerate(launched):
        for kind, lines in zip(
            found, differences(launched[0], other, ('rank 0', '\0')), strict=True
        ):
            for line in lines:
                kind.setdefault(line, line.replace('\0', f'rank {number}'))
    return Differences(*(list(kind.values()) for kind in found))


def _union(lists: Iterable[Iterable[str]]) -> list[str]:
    return sorted({line for lines in lists for line in lines})
