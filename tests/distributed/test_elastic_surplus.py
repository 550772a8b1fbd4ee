# SPDX-License-Identifier: Apache-2.0
"""More ranks are started than a layout has places: some train, others serve what they hold.

Three ranks on two nodes follow four that were killed, and only two fit a layout. What they come to
is compared, bit for bit, with plain Megatron of two ranks.
"""

import shutil
from pathlib import Path

import pytest

from moevement_ext.events import Resharded
from tests.distributed.conftest import Make, read_digest
from tests.distributed.test_elastic import (
    ONE,
    Layout,
    again,
    assert_equal,
    differing,
    killed,
    left_over,
    plain,
    resharded,
)

pytestmark = [pytest.mark.timeout(900), pytest.mark.thorough]

LARGE, SMALL = (Layout(ranks, expert=ranks, sharded=True) for ranks in (4, 2))
THREE_RANKS = Layout(3, expert=4, sharded=True)
LAYOUTS = ['--sparse-ckpt-elastic-layouts', 'ep=2']
ALONE = ['--sparse-ckpt-replicas', '0']
DENSE = '--dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist --save-interval 1'.split()
IDLES = 'rank 2 does not train: the layout has no place for it'


@pytest.mark.parametrize('struck', [False, True], ids=['sound', 'struck'])
def test_surplus_rank_serves_the_windows_of_its_node(
    struck: bool, cluster: Make, tmp_path: Path
) -> None:
    """Its node alone has the parts of two ranks. The launcher replaces a surplus worker, too."""
    job = killed(cluster, LARGE, tmp_path / 'dense', *ONE, *LAYOUTS, *ALONE)
    after = again(job, cluster, THREE_RANKS, *ONE, *LAYOUTS, *ALONE)
    strikes = {'fail_at': '0:11:forward'} if struck else {}
    assert after.survive(**strikes) == ({0: 1} if struck else {})
    assert IDLES in after.output(0)
    assert resharded(after).dense_at >= 6
    assert after.events_of(Resharded, rank=1)[-1].remote_bytes
    assert after.events_of(Resharded, rank=2) == []
    assert left_over(job) == []
    expected = plain(cluster, SMALL, tmp_path / 'dense', resharded(after).dense_at)
    assert_equal(read_digest(after), expected)


@pytest.mark.mutation
def test_records_of_another_owner_change_the_bits(cluster: Make, tmp_path: Path) -> None:
    job = killed(cluster, LARGE, tmp_path / 'dense', *ONE, *LAYOUTS, *ALONE)
    (memory,) = job.memory.parent.glob(f'{job.name}.*')
    kept = shutil.copytree(memory, tmp_path / 'kept')
    found = []
    for mutation in (None, 'mutations.elastic:a_surplus_rank_serves_records_of_another_owner'):
        shutil.copytree(kept, memory, dirs_exist_ok=True)
        after = again(job, cluster, THREE_RANKS, *ONE, *LAYOUTS, *ALONE)
        assert after.survive(mutation=mutation) == {}
        found.append(read_digest(after))
    assert differing(*found)
