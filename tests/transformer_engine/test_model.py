# SPDX-License-Identifier: Apache-2.0
"""Models of Transformer Engine's layers are taken apart by the rules, and its Adam is captured.

Without a GPU they are built, frozen and captured, but compute nothing.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    'transformer_engine.pytorch',
    reason='needs Transformer Engine, in a run of this folder alone',
    exc_type=ImportError,
)

from megatron.moevement.seams import cpu_device  # noqa: E402
from tests.distributed import test_inventory  # noqa: E402
from tests.distributed.conftest import MODEL, TRAINING  # noqa: E402
from tests.distributed.harness.cluster import ROOT, free_port  # noqa: E402
from tests.distributed.probes import training as probes  # noqa: E402

pytestmark = [
    pytest.mark.transformer_engine,
    pytest.mark.skipif(not cpu_device.needed(), reason='with a GPU scripts/gpu_check.sh trains'),
]

BF16 = '--bf16 --use-distributed-optimizer'
GROUPED = '--moe-grouped-gemm'
LATENT = """--multi-latent-attention --qk-layernorm --kv-lora-rank 16 --qk-head-dim 16
 --qk-pos-emb-head-dim 8 --v-head-dim 16"""
PRECISE = """--use-precision-aware-optimizer --main-params-dtype fp16 --exp-avg-dtype bf16
 --exp-avg-sq-dtype bf16"""
SETUPS = {
    'grouped': f'{BF16} {GROUPED}',
    'one-by-one': BF16,
    'latent-and-shared': f'{BF16} {GROUPED} {LATENT} --moe-shared-expert-intermediate-size 32',
    'narrow-state': f'{BF16} {GROUPED} {PRECISE}',
    'plain-optimizer': f'--bf16 {GROUPED}',
}
LAYERS, EXPERTS = {1, 2, 3, 4}, 4


def _start(folder: Path, flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `at_start` writes down: the inventory, and what else it found."""
    model = ['transformer_engine' if one == 'local' else one for one in MODEL]
    command = [
        *(sys.executable, '-m', 'tests.transformer_engine.at_start', *model, *TRAINING),
        *('--mock-data', '--global-batch-size', '4', '--train-iters', '4'),
        *('--untie-embeddings-and-output-weights', *flags.split()),
        *('--sparse-ckpt', '--sparse-ckpt-window', '3', '--sparse-ckpt-run-id', folder.name),
        *('--sparse-ckpt-dir', str(folder), '--sparse-ckpt-digest', str(folder / 'digest.json')),
    ]
    place = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port()), 'WORLD_SIZE': '1'}
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **place, 'RANK': '0', 'LOCAL_RANK': '0'},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    inventory, found = (probes.read(folder, name, 1)[0] for name in ('inventory', 'found'))
    return inventory, found


@pytest.mark.parametrize('name', SETUPS)
def test_model_is_taken_apart_by_the_rules(name: str, tmp_path: Path) -> None:
    inventory, found = _start(tmp_path, SETUPS[name])
    grouped = GROUPED in SETUPS[name]
    test_inventory.check_operators_partition_the_model(inventory)
    test_inventory.check_kinds(inventory, LAYERS, EXPERTS, grouped=grouped)
    test_inventory.check_buffers(inventory, router_bias=False)
    test_inventory.check_plans([inventory], tied=False)
    if name != 'narrow-state':  # where the optimizer is given the weight and holds the master
        test_inventory.check_captured_ranges([inventory])
    assert found['fused'] and all(found['fused'])
    assert bool(found['grouped']) == grouped
    assert found['extra'], 'upstream writes it into dense checkpoints'
    assert not any('_extra_state' in tensor for _, tensor, *_ in inventory['captured'])


@pytest.mark.parametrize('name', ['grouped', 'one-by-one'])
def test_experts_of_a_group_thaw_together(name: str, tmp_path: Path) -> None:
    inventory, found = _start(tmp_path, SETUPS[name])
    of_experts = {
        parameter: operator
        for operator, (kind, parameters, _) in inventory['operators'].items()
        if kind == 'expert'
        for parameter in parameters
    }
    assert len(found['grouped']) == (2 * len(LAYERS) if name == 'grouped' else 0)
    assert all(one == [f'weight{n}' for n in range(EXPERTS)] for one in found['grouped'].values())
    assert not of_experts.keys() & set(found['all experts frozen'])
    thawed = of_experts.keys() & set(found['all but one expert frozen'])
    wanted = {one for one, owner in of_experts.items() if owner == 'layer1.expert0'}
    if name == 'grouped':
        layer = next(iter(wanted)).split('.mlp.')[0]
        wanted = {one for one in of_experts if one.startswith(f'{layer}.mlp.')}
        assert len(wanted) == 2 * EXPERTS
    assert thawed == wanted
