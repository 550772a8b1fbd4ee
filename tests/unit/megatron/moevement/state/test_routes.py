# SPDX-License-Identifier: Apache-2.0
"""Which micro-batches are routed, and what is handed on; `tests/distributed` runs routed jobs."""

import pytest
import torch

from megatron.moevement.state.routes import Routes, not_routed, pieces
from moevement_ext.config import SparseCheckpointConfig
from tests.unit.megatron.moevement.job.test_identity import parsed

GLOBAL = SparseCheckpointConfig(recovery='global')


@pytest.mark.parametrize('hosts', [1, 2, 3, 5])
def test_pieces_are_all_micro_batches(hosts: int) -> None:
    for micro_batches in (1, 3, 12, 13):
        found = pieces(micro_batches, hosts)
        assert (len(found), sum(found)) == (hosts, micro_batches)
        assert max(found) - min(found) <= 1


@pytest.mark.parametrize(
    ('flags', 'named'),
    [
        ('', None),
        ('--expert-model-parallel-size 2 --moe-z-loss-coeff 1e-3', None),
        ('--fp8-format hybrid', '--fp8'),
        ('--mtp-num-layers 1', '--mtp-num-layers'),
        ('--moe-router-load-balancing-type global_aux_loss', 'global_aux_loss'),
        ('--overlap-moe-expert-parallel-comm', '--overlap-moe-expert-parallel-comm'),
        ('--cuda-graph-impl local', '--cuda-graph-impl'),
    ],
)
def test_what_keeps_guests_computing_is_named(flags: str, named: str | None) -> None:
    reason = not_routed(vars(parsed(*flags.split())), GLOBAL)
    assert reason == named or (named is not None and named in str(reason))


def test_pipeline_needs_a_recovery_without_logs() -> None:
    """The logs of a host would hold the guest's tensors too."""
    settings = vars(parsed('--pipeline-model-parallel-size', '2'))
    assert not_routed(settings, GLOBAL) is None
    assert 'recovery global' in str(not_routed(settings, SparseCheckpointConfig()))


@pytest.mark.parametrize(('guests', 'said'), [([], ''), ([1], 'do not work with --fp8')])
def test_reason_is_said_once(
    guests: list[int],
    said: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, 'get_rank', lambda: 0)
    routes = Routes('--fp8', lambda: guests, lambda: [0, 0], dict)
    for forward_only in (False, True, False):  # an evaluation changes nothing
        routes._run(lambda **call: call, forward_only=forward_only)
    for _ in range(2):
        assert routes._run(lambda **call: call, num_microbatches=4) == {'num_microbatches': 4}
    assert caplog.text.count(said or 'guests') == bool(said)
