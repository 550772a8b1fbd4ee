# SPDX-License-Identifier: Apache-2.0
"""The planning tool: output, exit status, flags of Megatron, messages for wrong input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.plan import __main__ as plan
from tools.plan.flags import parse_megatron_flags

ROOT = Path(__file__).resolve().parents[4]

MEGATRON = (
    '--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 '
    '--micro-batch-size 4 --global-batch-size 16 --position-embedding-type rope '
    '--normalization RMSNorm --swiglu '
    '--disable-bias-linear --untie-embeddings-and-output-weights --num-experts 8 '
    '--moe-router-topk 2 --moe-ffn-hidden-size 256 --vocab-size 258 --bf16 '
    '--use-distributed-optimizer --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 '
    '--sparse-ckpt --sparse-ckpt-window 3 --lr 1e-3'
).split()

CLUSTER = {
    'name': 'two',
    'gpus_per_node': 2,
    'gpu_memory_bytes': 1e9,
    'copy_bytes_per_s': 1e9,
    'network_bytes_per_s': 1e9,
    'host_memory_bytes': 4e9,
    'peak_flops': 1e11,
}


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / 'cluster.json'
    path.write_text(json.dumps(CLUSTER))
    return str(path)


def run(capsys, *argv):
    status = plan.main([str(item) for item in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def as_json(capsys, *argv):
    status, out, err = (
        run(capsys, *argv, '--json') if '--' not in argv else run(capsys, '--json', *argv)
    )
    assert status == 0, err
    return json.loads(out)


def test_flags_of_a_run_give_its_captured_bytes(capsys, cluster):
    """The slots that a run with these flags captured: 9672320, 8492672 and 8487104 bytes."""
    found = as_json(
        capsys,
        *f'--cluster {cluster} --gpus 4 --iteration-time 1 --log-lag 1 --'.split(),
        *MEGATRON,
        *('--sparse-ckpt-digest', 'digest.json'),
    )
    assert found['window'] == 3
    last = found['stages'][-1]
    assert last['stages'] == [1]
    # Of the rest, tensors are aligned to 64 bytes and routers have counters.
    assert last['slot_bytes'] == pytest.approx([9672320, 8492672, 8487104], rel=1e-4)
    assert found['host_memory_bytes_per_node']['log_ring'] == 2 * (6 * 524288 + 262144)
    assert found['unused_flags'] == ['--sparse-ckpt', '--lr', '--sparse-ckpt-digest']


def test_the_trainings_limit_of_the_network_is_planned_with(capsys, cluster):
    argv = ['--cluster', cluster, '--gpus', 4, '--iteration-time', 10, '--', *MEGATRON]
    flag = '--sparse-ckpt-network-gb-per-s'
    free, held, off = (as_json(capsys, *argv, *more) for more in ([], [flag, 0.1], [flag, 'off']))
    assert off == free
    assert held['network_budget_bytes'] == 1e9 and free['network_budget_bytes'] == 2.5e9
    status, out, err = run(capsys, *argv, flag, '0.001')
    assert (status, out, err.count('\n')) == (2, '', 1)
    assert f'{flag} 0.001 must be auto, off, or a number of at least 0.02' in err


def test_megatron_model_is_counted_as_megatron_does():
    training = parse_megatron_flags(MEGATRON).training(None, 4)
    layer = 4 * 256 * 256 + 2 * 256 + 8 * 256 + 8 * 3 * 256 * 256
    assert training.model.total_parameters == 4 * layer + 2 * 258 * 256 + 256
    assert training.layout.distributed_optimizer
    parse_megatron_flags(['--sparse-ckpt-digest', 'file'])  # as training takes it
    plain = parse_megatron_flags([item for item in MEGATRON if item != '--bf16'])
    assert plain.training(None, 4).precision.compute == 'fp32'


def test_planning_needs_neither_torch_nor_megatron():
    code = (
        'import sys, tools.plan.__main__, tools.simulate.__main__, tools.simulate.scenario; '
        'assert not {"torch", "megatron"} & {name.split(".")[0] for name in sys.modules}'
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_python_without_the_packages_prints_a_remedy():
    command = [sys.executable, '-S', '-m', 'tools.plan', '--help']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert 'scripts/setup_env.sh' in line and done.stdout == ''
