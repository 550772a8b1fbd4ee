# SPDX-License-Identifier: Apache-2.0
"""What the tool says of the flags of a job; the page is read in tests of its lists."""

import pytest

from tools.compatibility import main

JOB = (
    '--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 '
    '--max-position-embeddings 64 --micro-batch-size 1 --distributed-backend gloo'
).split()


@pytest.mark.parametrize(
    ('flags', 'status', 'said'),
    [
        ('', 0, 'protected: a failure is recovered on the stages that lost a worker alone'),
        ('--sparse-ckpt-recovery whole-job', 0, 'recovered by all workers together'),
        ('--tp-comm-overlap', 0, 'whole job: --tp-comm-overlap: '),
        ('--optimizer sgd', 1, 'refused: --optimizer sgd: use --optimizer adam'),
        ('--sparse-ckpt-window 0', 1, 'refused: --sparse-ckpt-window 0 must be at least 1'),
    ],
)
def test_how_a_job_can_be_protected_is_said_without_starting_it(
    flags: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(['--', *JOB, *flags.split()]) == status
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        ([], 'give -- and the flags of the job, or --write'),
        (['--write', '--', '--bf16'], 'give -- and the flags of the job, or --write'),
        (['--', '--sparse-ckpt-windw', '3'], 'did you mean --sparse-ckpt-window?'),
        (['--', '--nonsense'], 'unrecognized arguments: --nonsense (pretrain_gpt.py --help'),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and said in line
