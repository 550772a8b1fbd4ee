# SPDX-License-Identifier: Apache-2.0
"""A long job with masters of 16 bits beside weights in fp8, which is lost, and then its stages.

Stand-ins have the rules of Transformer Engine's layers and Adam on the CPU (`tests/stand_ins`).
"""

from collections.abc import Callable

import pytest

from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import SETTLED, Fault, fault_all
from tests.distributed.test_masters import C4, STAND_INS, TWO_REPLICAS, check_kinds, check_numbers

pytestmark = pytest.mark.timeout(900)

FLAGS = f'{C4} {TWO_REPLICAS} --train-iters 20'.split()
FAULTS = Fault('a stage', '1:12:backward'), Fault('the other one', '2:18:step')


@pytest.mark.thorough
def test_narrow_masters_with_fp8_weights(
    cluster: Callable[..., Cluster], reference: Callable[..., dict]
) -> None:
    expected = reference(*FLAGS, stand_in=STAND_INS, check=check_numbers)
    check_kinds('c4-two-replicas', expected)
    fault_all(
        lambda: cluster(*FLAGS, '--sparse-ckpt-window', '3', *SETTLED),
        FAULTS,
        expected,
        lost_at='1:8:forward',
        mutation=STAND_INS,
    )
