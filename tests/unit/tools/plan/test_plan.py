# SPDX-License-Identifier: Apache-2.0
"""The planning tool: output, exit status, flags of Megatron, messages for wrong input."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.plan import __main__ as plan
from tools.plan.description import DescriptionError
from tools.plan.flags import layers_with_experts, parse_megatron_flags

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

_CHUNK = '--num-layers-per-virtual-pipeline-stage'
_TENSOR, _REPLICAS = '--tensor-model-parallel-size', '--sparse-ckpt-replicas'

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
def operators(tmp_path):
    def write(*sizes):
        path = tmp_path / 'operators.json'
        names = 'abcdefghijklmnopqrstuvwxyz'
        content = [
            {'name': name, 'full_bytes': full, 'weight_bytes': weights}
            for name, (full, weights) in zip(names, sizes, strict=False)
        ]
        path.write_text(json.dumps(content))
        return str(path)

    return write


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


def test_missing_file_is_named_once(capsys, tmp_path):
    path = tmp_path / 'file'
    path.write_bytes(b'\0')
    _, _, err = run(capsys, '--operators', path, '--budget-bytes', 4)
    assert err.startswith(f'plan: {path}: JSON is malformed')


def test_a_large_job_fits_into_a_part_of_its_nodes(capsys):
    """By the pages: windows, what holders of replicas need of them, and no more log than that."""
    job = ('--model', 'deepseek-v3', '--cluster', 'h100', '--mfu', 0.35, '--window', 1)
    plan = as_json(capsys, *job)
    for flags, most_gib in ((), 404.0), (('--log-lag', plan['log_lag']), 306.4):
        memory = as_json(capsys, *job, *flags)['host_memory_bytes_per_node']
        assert memory['total'] < most_gib * 2**30
        assert memory['replicas'] < 130 * 2**30
        rounded = 2 * memory['own_windows'] - memory['replicas']  # to whole pages, each file
        assert 0 <= rounded < 2**20


def test_list_is_divided_into_slots(capsys, operators):
    path = operators((12, 2), (12, 2), (12, 2))
    assert as_json(capsys, '--operators', path, '--budget-bytes', 36) == {
        'window': 1,
        'slots': [['a', 'b', 'c']],
        'slot_bytes': [36],
    }
    assert as_json(capsys, '--operators', path, '--budget-bytes', 16) == {
        'window': 3,
        'slots': [['a'], ['b'], ['c']],
        'slot_bytes': [16, 14, 12],
    }


def test_slots_are_balanced(capsys, operators):
    # Filled greedily the slots would have 49 and 12 bytes.
    path = operators((12, 1), (12, 1), (12, 1), (12, 1), (12, 1))
    found = as_json(capsys, '--operators', path, '--budget-bytes', 51)
    assert (found['window'], found['slot_bytes']) == (2, [27, 36])


def test_infeasible_list_names_the_operator(capsys, operators):
    path = operators((4, 1), (12, 2), (4, 1))
    status, out, err = run(capsys, '--operators', path, '--budget-bytes', 12, '--json')
    assert (status, out) == (2, '')
    assert "operator 'b'" in err and '13' in err


def test_printed_algorithm_exceeds_the_budget_with_a_warning(capsys, operators):
    path = operators((12, 2), (12, 2), (12, 2))
    status, out, err = run(
        capsys, '--operators', path, '--budget-bytes', 16, '--algorithm', 'paper', '--json'
    )
    assert status == 0
    assert json.loads(out) == {'window': 2, 'slots': [['a', 'b'], ['c']], 'slot_bytes': [26, 12]}
    assert 'exceeds the budget by 10 bytes' in err


def test_empty_list_is_one_empty_slot(capsys, operators):
    found = as_json(capsys, '--operators', operators(), '--budget-bytes', 1)
    assert found == {'window': 1, 'slots': [[]], 'slot_bytes': [0]}


def test_list_is_printed_as_a_table(capsys, operators):
    path = operators((12, 2), (12, 2))
    status, out, _ = run(capsys, '--operators', path, '--budget-bytes', '2e1')
    assert status == 0 and 'Window of 2' in out


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--operators', 'x.json'], '--budget-bytes is missing'),
        (['--operators', 'x.json', '--budget-bytes', '0'], 'whole number of bytes'),
        (['--operators', 'x.json', '--budget-bytes', '1.5'], 'whole number of bytes'),
        (['--model', 'gpt-moe'], '--iteration-time or --mfu'),
        (['--model', 'gpt-moe', '--mfu', '0.3', '--algorithm', 'paper'], 'for --operators'),
        (['--model', 'gpt-moe', '--mfu', '-1'], 'above 0'),
        (['--model', 'gpt-moe', '--mfu', '0.3', '--gpus', '0'], '--gpus: 0: give a whole number'),
        (['--mfu', '0.3', '--gpus', '8', '--', '--sparse-ckpt-recovery', 'no'], 'sparse-ckpt-rec'),
        (
            ['--mfu', '0.3', '--', '--sparse-ckpt-replica', '2', '--sparse-ckpt-events', 'e'],
            'arguments: --sparse-ckpt-replica; did you mean --sparse-ckpt-replicas?',
        ),
    ],
)
def test_wrong_flags_are_named(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        plan.main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--model', 'nothing', '--mfu', '0.3'], 'no such file, nor one of moe-llava'),
        (['--model', 'gpt-moe', '--cluster', 'b200', '--mfu', '0.3'], '--cluster b200'),
        (['--model', 'gpt-moe', '--mfu', '1.3'], '--mfu is 1.3'),
        (['--model', 'gpt-moe', '--mfu', '0.3', '--gpus', '97'], '--gpus is 97'),
        (['--model', 'gpt-moe', '--mfu', '0.3', '--window', 'x'], '--window x'),
        (['--model', 'gpt-moe', '--mfu', '0.3', '--window', '0'], '--window is 0'),
        (['--model', 'gpt-moe', '--mfu', '0.3', '--restart-time', '-5'], '--restart-time is -5'),
        (['--mfu', '0.3', '--gpus', '8', '--', *MEGATRON, _CHUNK, '0'], f'{_CHUNK} 0: give'),
        (['--model', 'gpt-moe', '--mfu', '0.3', '--compute', 'int4'], '--compute is .int4.'),
        (['--model', 'gpt-moe', '--mfu', '0.3', '--', _TENSOR, '0'], f'{_TENSOR} is 0;'),
        (['--model', 'gpt-moe', '--mfu', '0.3', '--', _REPLICAS, '-1'], f'{_REPLICAS} is -1;'),
        (['--model', 'gpt-moe', '--mfu', '0.3', '--', '--num-layers', '3'], '--num-layers'),
        (['--mfu', '0.3', '--gpus', '8', '--', '--num-layers', '3'], '--hidden-size is missing'),
        (['--mfu', '0.3', '--', *MEGATRON], '--gpus is missing'),
        (['--model', 'gpt-moe', '--mfu', '0.3', '--copy-bandwidth', '0.001'], "operator 'embed"),
        (['--model', 'deepseek-moe', '--mfu', '0.3', '--host-memory', '9'], 'a node has'),
    ],
)
def test_no_plan_is_status_2_with_the_reason(capsys, argv, message):
    status, _, err = run(capsys, *argv)
    assert status == 2
    assert re.search(message, ' '.join(err.split()))


def test_numbers_beyond_any_machine_are_no_crash(capsys, operators):
    job = ('--model', 'deepseek-moe', '--iteration-time', 1e300)
    assert as_json(capsys, *job)['window'] == 1
    assert as_json(capsys, '--operators', operators((12, 2)), '--budget-bytes', 1e30)['window'] == 1
    big = (10**30, 2)
    status, _, err = run(capsys, '--operators', operators(big), '--budget-bytes', 16)
    assert status == 2 and 'full_bytes' in err
    status, out, _ = run(capsys, '--model', 'gpt-moe', '--mfu', 0.3, '--restart-time', -5)
    assert (status, out) == (2, ''), 'nothing is printed of a plan that is refused'


def test_table_and_json_have_the_same_figures(capsys):
    argv = ['--model', 'deepseek-moe', '--cluster', 'a100-80gbit', '--iteration-time', '2.9']
    found = as_json(capsys, *argv)
    status, out, _ = run(capsys, *argv)
    assert status == 0
    assert f'Window of {found["window"]}' in out
    assert found['limited_by'] == 'network'
    assert f'{found["ettr_exact"]:.4f}' in out
    assert all(warning[:40] in ' '.join(out.split()) for warning in found['warnings'])


def test_flags_of_a_run_give_its_captured_bytes(capsys, cluster):
    """The slots that a run with these flags captured: 9672320, 8492672 and 8487104 bytes."""
    found = as_json(
        capsys,
        *f'--cluster {cluster} --gpus 4 --iteration-time 1 --log-lag 1 --'.split(),
        *MEGATRON,
    )
    assert found['window'] == 3
    last = found['stages'][-1]
    assert last['stages'] == [1]
    # Of the rest, tensors are aligned to 64 bytes and routers have counters.
    assert last['slot_bytes'] == pytest.approx([9672320, 8492672, 8487104], rel=1e-4)
    assert found['host_memory_bytes_per_node']['log_ring'] == 2 * (6 * 524288 + 262144)
    assert found['unused_flags'] == ['--sparse-ckpt', '--lr']


def test_global_batch_without_a_flag_is_megatrons(capsys, cluster):
    """One micro-batch on each of the two data-parallel ranks."""
    argv = f'--cluster {cluster} --gpus 4 --iteration-time 1 --log-lag 1 --'.split()
    at = MEGATRON.index('--global-batch-size')
    others = MEGATRON[:at] + MEGATRON[at + 2 :]
    found = as_json(capsys, *argv, *others)
    assert found == as_json(capsys, *argv, *others, '--global-batch-size', '8')


def test_log_has_room_for_as_long_as_persisting_takes(capsys, cluster):
    """Two nodes of two ranks; an iteration is the most that there can be."""
    argv = ['--cluster', cluster, '--gpus', 4, '--', *MEGATRON]
    fast = as_json(capsys, '--iteration-time', 10, *argv)
    slow = as_json(capsys, '--iteration-time', 0.001, '--hidden-fraction', 1, *argv)
    told = as_json(capsys, '--iteration-time', 10, *argv, '--sparse-ckpt-log-lag', 0.5)
    assert 0 < fast['log_lag'] < 0.5 and slow['log_lag'] == 1
    ring, shorter, same = [
        found['host_memory_bytes_per_node']['log_ring'] for found in (fast, told, slow)
    ]
    assert ring == same and ring - shorter == 2 * 524288 // 2, 'training reserves for an iteration'
    # 0.5 GB/s leave a node of two ranks, twice the last slot of the larger stage at most
    last = max(stage['slot_bytes'][-1] for stage in fast['stages'])
    assert fast['persist_s'] == pytest.approx(0.1 + last / 1e9 + last / 0.25e9, rel=0.05)


def test_the_trainings_limit_of_the_network_is_planned_with(capsys, cluster):
    argv = ['--cluster', cluster, '--gpus', 4, '--iteration-time', 10, '--', *MEGATRON]
    flag = '--sparse-ckpt-network-gb-per-s'
    free, held, off = (as_json(capsys, *argv, *more) for more in ([], [flag, 0.1], [flag, 'off']))
    assert off == free
    assert held['network_budget_bytes'] == 1e9 and free['network_budget_bytes'] == 2.5e9
    status, out, err = run(capsys, *argv, flag, '0.001')
    assert (status, out, err.count('\n')) == (2, '', 1)
    assert f'{flag} is 0.001; give auto, off, or a number of at least 0.02' in err


def test_megatron_model_is_counted_as_megatron_does():
    training = parse_megatron_flags(MEGATRON).training(None, 4)
    layer = 4 * 256 * 256 + 2 * 256 + 8 * 256 + 8 * 3 * 256 * 256
    assert training.model.total_parameters == 4 * layer + 2 * 258 * 256 + 256
    assert training.layout.distributed_optimizer
    plain = parse_megatron_flags([item for item in MEGATRON if item != '--bf16'])
    assert plain.training(None, 4).precision.compute == 'fp32'


def test_formats_that_need_a_recipe_or_lose_updates_are_planned_with_a_warning(capsys):
    argv = ['--model', 'gpt-moe', '--iteration-time', '2.9']

    def warned(*flags):
        text = ' '.join(as_json(capsys, *argv, *flags)['warnings'])
        return 'only with --fp8-recipe delayed' in text, 'lose updates' in text

    assert {name: warned('--precision', name) for name in ('bf16', 'c1', 'c2', 'c4', 'c5')} == {
        **dict.fromkeys(('bf16', 'c1', 'c2', 'c4'), (False, False)),
        'c5': (False, True),
    }
    narrow = ('--', '--fp8-param-gather', '--main-params-dtype', 'fp16', '--fp8-format', 'hybrid')
    assert warned(*narrow) == (False, False), "upstream's own recipe is delayed"
    assert warned(*narrow, '--fp8-recipe', 'tensorwise') == (True, False)


def test_latent_attention_and_uneven_stages_are_planned():
    text = (
        '--num-layers 7 --hidden-size 64 --num-attention-heads 4 --vocab-size 128 --num-experts 4 '
        '--moe-layer-freq ([0]*1+[1]*6) --multi-latent-attention --kv-lora-rank 8 --q-lora-rank 16 '
        '--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 '
        '--decoder-last-pipeline-num-layers 2'
    )
    training = parse_megatron_flags(text.split()).training(None, 4)
    assert training.layout.layers_per_stage == (1, 2, 2, 2)
    assert training.model.latent.query_rank == 16
    assert training.model.moe_layers == (0, 1, 1, 1, 1, 1, 1)


def test_virtual_stages_are_planned():
    flags = [*MEGATRON, '--num-layers-per-virtual-pipeline-stage', '1']
    assert parse_megatron_flags(flags).training(None, 4).layout.chunks == 2
    flags[-1] = '3'
    with pytest.raises(DescriptionError, match='must divide the 4 layers'):
        parse_megatron_flags(flags).training(None, 4)


def test_layer_frequency_is_parsed():
    assert layers_with_experts('2', 5) == (1, 0, 1, 0, 1)
    assert layers_with_experts('[0]+[1,0]*2', 5) == (0, 1, 0, 1, 0)
    for wrong in ('0', 'x', '[2]*3', '__import__("os")'):
        with pytest.raises(DescriptionError, match='--moe-layer-freq'):
            layers_with_experts(wrong, 3)


def test_planner_runs_as_a_module(operators):
    path = operators((12, 2), (12, 2))
    done = subprocess.run(
        [sys.executable, '-m', 'tools.plan', '--operators', path, '--budget-bytes', '24', '--json'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)['window'] == 1


def test_planning_needs_neither_torch_nor_megatron():
    code = (
        'import sys, tools.plan.__main__, tools.simulate.__main__, tools.simulate.iteration; '
        'assert not {"torch", "megatron"} & {name.split(".")[0] for name in sys.modules}'
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('tool', ['plan', 'simulate', 'chaos', 'bench.overhead'])
def test_python_without_the_packages_prints_a_remedy(tool):
    command = [sys.executable, '-S', '-m', f'tools.{tool}', '--help']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert 'scripts/setup_env.sh' in line and done.stdout == ''
