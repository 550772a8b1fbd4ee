# SPDX-License-Identifier: Apache-2.0
"""What is said of the flags of a job before it starts.

That a start says the same: `tests/distributed/test_refusals.py`.
"""

import os
import sys
from pathlib import Path

import pytest

from tools import prepare_data
from tools.check import main

JOB = (
    '--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16 '
    '--max-position-embeddings 64 --micro-batch-size 1 --distributed-backend gloo --sparse-ckpt'
).split()
LOCALIZED = (
    'protected: yes; localized: yes: a failure is recovered only on the stages that lost a worker'
)
WHOLE_JOB = 'protected: yes; localized: no: a failure restarts all workers'


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        ('', []),
        ('--sparse-ckpt-recovery whole-job', ['whole job only: --sparse-ckpt-recovery whole-job']),
        (
            '--high-priority-stream-groups dp_cp --log-straggler',
            [
                'whole job only: --high-priority-stream-groups: ',
                'whole job only: --log-straggler: ',
            ],
        ),
    ],
)
def test_flags_for_whole_job_recovery_are_reported(
    flags: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(['--', *JOB, *flags.split()]) == 0
    *reasons, last = capsys.readouterr().out.splitlines()
    assert last.startswith(WHOLE_JOB if said else LOCALIZED)
    assert len(reasons) == len(said)
    assert all(line.startswith(start) for line, start in zip(reasons, said, strict=True))


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        ('--optimizer sgd', '--sparse-ckpt does not support --optimizer sgd: use --optimizer adam'),
        (
            '--no-load-optim --save /nowhere --load /nowhere',
            '--sparse-ckpt does not support --no-load-optim with the same --save and --load: leave '
            'it out; if the first start needs it, write a first checkpoint',
        ),
        ('--sparse-ckpt-window 0', '--sparse-ckpt-window 0 must be at least 1'),
        ('--sparse-ckpt-fp8-masters', '--sparse-ckpt-fp8-masters takes the place of fp16 masters'),
        ('--tokenizer-model /nowhere', '--tokenizer-model: /nowhere does not exist for rank 0'),
        ('--num-attention-heads 3', 'Megatron ends with AssertionError: assert args.hidden_size'),
        (
            '--global-batch-size 8 --sparse-ckpt-elastic restart '
            '--sparse-ckpt-elastic-layouts pp=foo',
            "--sparse-ckpt-elastic-layouts 'pp=foo': give sizes",
        ),
        (
            '--sparse-ckpt-events /etc/passwd/x',
            '--sparse-ckpt-events /etc/passwd/x: events cannot be written there',
        ),
        ('--sparse-ckpt-disk /proc', '--sparse-ckpt-disk /proc: windows cannot be kept there'),
        (
            '--sparse-ckpt-dir /etc/passwd',
            '--sparse-ckpt-dir /etc/passwd: training would be unprotected: /etc/passwd is not',
        ),
        ('--data-path /nowhere/x', '--data-path: /nowhere/x.idx does not exist for rank 0'),
        (
            '--num-experts 4 --sparse-ckpt-strategy moc --sparse-ckpt-experts 9',
            '--sparse-ckpt-experts 9 must be at most the number of experts of a layer, 4',
        ),
    ],
)
def test_a_refusal_has_status_2(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['--', *JOB, *flags.split()]) == 2
    refusal, *_, last = capsys.readouterr().out.splitlines()
    assert refusal.startswith(f'refused: {said}')
    assert last == 'protected: no, a job of world size 1 would not start'


def test_a_part_of_the_data_without_documents_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, prefix = tmp_path / 'text.txt', tmp_path / 'text'
    text.write_text('a document')
    assert prepare_data.main(['--input', str(text), '--output-prefix', str(prefix)]) == 0
    capsys.readouterr()
    assert main(['--', *JOB, '--data-path', str(prefix), '--split', '9,1,0']) == 2
    said = f'refused: --split 9,1,0: a part of it gets none of the 1 sequences of {prefix}; give'
    assert capsys.readouterr().out.startswith(said)
    assert main(['--', *JOB, '--data-path', str(prefix), '--split', '1,0,0']) == 0


def test_all_refusals_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    flags = '--optimizer sgd --save-params-interval 5 --sparse-ckpt-disk /nowhere'
    assert main(['--', *JOB, *flags.split()]) == 2
    refused = capsys.readouterr().out.splitlines()[:-1]
    named = ('--optimizer', '--save-params-interval', '--sparse-ckpt-disk')
    assert [flag for line in refused for flag in named if f'{flag} ' in line] == list(named)


LAYOUT = '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --num-experts 4'.split()


@pytest.mark.parametrize(
    ('own', 'world_size', 'status', 'said'),
    [
        ([], None, 0, '; world size 4'),
        ([], '8', 0, '; world size 8'),
        (['--nproc', '16'], '8', 0, '; world size 16'),
        (['--nproc', '3'], None, 2, 'a job of world size 3 would not start'),
        (['--nproc', '6'], None, 2, 'a job of world size 6 would not start'),
    ],
)
def test_ranks_are_as_given_or_the_fewest(
    own: list[str],
    world_size: str | None,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv('WORLD_SIZE', raising=False)
    if world_size is not None:
        monkeypatch.setenv('WORLD_SIZE', world_size)
    before, environment = sys.argv, dict(os.environ)
    assert main([*own, '--', *JOB, *LAYOUT]) == status
    assert capsys.readouterr().out.splitlines()[-1].endswith(said)
    assert (sys.argv, dict(os.environ)) == (before, environment)


@pytest.mark.parametrize(
    ('flags', 'ranks', 'said'),
    [
        ('--expert-model-parallel-size 2 --num-distributed-optimizer-instances 2', 4, None),
        (
            '--num-distributed-optimizer-instances 3',
            3,
            '8 data-parallel ranks are not divisible by 3',
        ),
        ('--context-parallel-size 2 --num-distributed-optimizer-instances 2', 2, None),
    ],
)
def test_groups_of_the_optimizer_count(
    flags: str, ranks: int, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = [*JOB, '--num-experts', '4', '--use-distributed-optimizer', *flags.split()]
    assert main(['--', *job]) == 0
    assert f'; world size {ranks}\n' in capsys.readouterr().out
    if said is not None:
        assert main(['--nproc', '8', '--', *job]) == 2
        assert said in capsys.readouterr().out


def test_layout_that_a_start_would_take_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    fallback = '--sparse-ckpt-elastic restart --sparse-ckpt-elastic-layouts pp=2'.split()
    flags = [*JOB, '--pipeline-model-parallel-size', '4', '--global-batch-size', '8', *fallback]
    assert main(['--nproc', '6', '--', *flags]) == 0
    *notes, last = capsys.readouterr().out.splitlines()
    assert 'note: 4 ranks (PP 4) train, if 6 are started' in notes
    assert last.endswith('; world size 4')
    assert main(['--nproc', '3', '--', *flags]) == 0
    assert 'note: 2 ranks (PP 2) train' in capsys.readouterr().out


def test_a_login_node_judges_grouped_experts_as_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*JOB, '--num-experts', '4', '--moe-grouped-gemm', '--disable-bias-linear']
    assert main(['--', *flags, '--distributed-backend', 'nccl']) == 0
    assert 'note: no GPU is visible here; --moe-grouped-gemm is' in capsys.readouterr().out
    assert main(['--', *flags]) == 2
    assert 'Unsupported compute capability' in capsys.readouterr().out


def test_nothing_is_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = f'--tensorboard-dir {tmp_path}/board --save {tmp_path}/dense --save-interval 5'
    flags += f' --sparse-ckpt-dir {tmp_path}/memory --sparse-ckpt-events {tmp_path}/events'
    flags += f' --sparse-ckpt-digest {tmp_path}/runs/digest.json'
    assert main(['--', *JOB, *flags.split()]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        ([], 'give -- and the flags of the job'),
        (['--nproc', '0', '--', '--bf16'], '--nproc: 0: give a whole number, 1 or more'),
        (['--', '--sparse-ckpt-windw', '3'], 'did you mean --sparse-ckpt-window?'),
        (['--', '--cuda-graph-modules', 'nosuch'], "KeyError: 'nosuch'"),
        (['--', '--nonsense'], 'unrecognized arguments: --nonsense (pretrain_gpt.py --help'),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and said in line
