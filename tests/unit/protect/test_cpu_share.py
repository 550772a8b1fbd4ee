# SPDX-License-Identifier: Apache-2.0
"""What `auto` is told of the cores: by the threads that move bytes, and where they train."""

import queue
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from moevement_ext.capture.copier import Copier
from moevement_ext.capture.layout import _Copy, in_pieces
from moevement_ext.config import SparseCheckpointConfig
from moevement_ext.protect.protection import Protection
from moevement_ext.rates import OtherWork
from tests.unit.test_rates import burn

pytestmark = pytest.mark.timed


def costing(seconds: float) -> SimpleNamespace:
    """A part whose work on a byte takes this CPU time."""
    return SimpleNamespace(cost=SimpleNamespace(s_per_byte=lambda: seconds))


def protection(
    device: str = 'cpu', share: float = 0.02, holders: int = 2, other: float = 0.0
) -> SimpleNamespace:
    """As much of one as tells of its cores: 1 + 2 * (2 + 3) = 11 CPU seconds a GB."""
    return SimpleNamespace(
        _rank=SimpleNamespace(config=SparseCheckpointConfig(cpu_share=share)),
        _device=torch.device(device),
        _reached=[('host', 1)] * holders,
        _statistics=SimpleNamespace(captured_bytes=0),
        _other_work=SimpleNamespace(share=lambda captured, byte_s: other),
        checkpointer=SimpleNamespace(copier=costing(1e-9)),
        windows=SimpleNamespace(replicator=costing(2e-9)),
        memory=SimpleNamespace(
            cores=4.0,
            receive_cost=costing(3e-9).cost,
            copies=SimpleNamespace(holders=[[1] * holders]),
        ),
    )


def told(training: SimpleNamespace) -> float | None:
    return Protection._cpu_bytes_per_s(training)  # type: ignore[arg-type]


def test_a_byte_costs_its_copy_and_each_of_its_replicas() -> None:
    assert told(protection()) == pytest.approx(0.02 * 4.0 / 11e-9)
    assert told(protection(holders=0)) == pytest.approx(0.02 * 4.0 / 1e-9)
    assert told(protection(share=0.1)) == pytest.approx(0.1 * 4.0 / 11e-9)


def test_other_work_of_helper_threads_leaves_less_to_captures() -> None:
    assert told(protection(other=0.03)) == pytest.approx((0.02 * 4.0 - 0.03) / 11e-9)
    assert told(protection(other=1.0)) == pytest.approx(0.25 * 0.02 * 4.0 / 11e-9)


@pytest.mark.parametrize('explained', [False, True])
def test_other_work_is_what_the_captured_bytes_do_not_explain(explained: bool) -> None:
    other = OtherWork()
    with ThreadPoolExecutor(1) as helper:  # it lives until its CPU time was read
        helper.submit(burn, 0.3).result()
        assert (other.share(10**9 if explained else 0, 1e-6) > 0) != explained


def test_without_a_share_and_on_a_gpu_the_cores_are_no_limit() -> None:
    assert told(protection(share=0)) is None
    assert told(protection('cuda')) is None
    unmeasured = protection(holders=0)
    unmeasured.checkpointer.copier = costing(0.0)
    assert told(unmeasured) is None


def test_copies_and_seals_are_measured() -> None:
    copier = Copier(torch.device('cpu'))
    try:
        errors: queue.Queue[Exception] = queue.Queue()
        broken = in_pieces([_Copy(torch.zeros(3), torch.zeros(4))])
        copier.start([], lambda: broken, lambda: None, errors.put)
        copier.drain()
        assert copier.cost.s_per_byte() == 0, 'what failed does not count'
        pieces = in_pieces([_Copy(torch.zeros(2**20), torch.ones(2**20))])
        copier.start([], lambda: pieces, lambda: None, errors.put)
        copier.drain()
        assert 0 < copier.cost.s_per_byte()
        copier.start([], lambda: [], lambda: burn(0.3), errors.put)
        copier.drain()
        assert copier.cost.s_per_byte() >= 0.3 / 2**22, 'the seal counts, too'
    finally:
        copier.stop()
