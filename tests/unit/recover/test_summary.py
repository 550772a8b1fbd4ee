# SPDX-License-Identifier: Apache-2.0
"""The line after a recovery states the cause and the outcome, and misleads no reader."""

import time

import pytest
import torch
from torch.distributed import DistBackendError

from moevement_ext.launch.launcher_events import JobEnded, JobRecovered
from moevement_ext.recover.fruitless import in_words
from moevement_ext.recover.outage import Gone, Summary, deaths, together
from moevement_ext.recover.verification import Verified
from moevement_ext.regroup.process_groups import RegroupError

NO_MEMORY = "NCCL error, NCCL version 2.28.9\nLast error:\nCuda failure 2 'out of memory'"
NOW = time.mktime((2026, 1, 31, 4, 32, 52, 0, 0, -1))
SECONDS = {'noticing it': 0.12, 'starting processes': 7.9, 'connecting': 0.0}


def summary(**changed: object) -> Summary:
    values = {
        'iteration': 37,
        'cause': deaths([Gone(1, 'node1', 'was killed by SIGKILL', NOW - 11.2)]),
        'lost': 0,
        'replayed': 6,
        'away_s': 11.2,
        'seconds': SECONDS,
        'source': 'window 31',
        'verified': Verified(13, 36, ()),
        'spares': '0 hot',
    }
    return Summary(**(values | changed))  # type: ignore[arg-type]


def test_one_line_answers_an_operators_questions() -> None:
    assert summary().line(NOW) == (
        ' sparse ckpt | 2026-01-31 04:32:52 | RECOVERED at iteration 37 | rank 1 on node1 was '
        'killed by SIGKILL at 04:32:40 | lost iterations: 0 | computed again: 6 | away: 11.2 s '
        '(noticing it 0.1, starting processes 7.9, the rest 3.2) | goes on from: window 31 | '
        'verified: 13 operators at iteration 36, differing: 0 | spares left: 0 hot |'
    )


def test_missing_comparison_does_not_read_like_a_defect() -> None:
    line = summary(verified=Verified(0, -1, ())).line(NOW)
    assert 'verified: checksums of the window (it is the newest that was captured)' in line
    assert 'nothing' not in line and summary(verified=Verified(0, -1, ())).is_exact


def test_unknown_facts_are_left_out() -> None:
    line = summary(lost=None, away_s=None, spares='').line(NOW)
    assert 'lost iterations: unknown' in line and 'since a time that nothing here has seen' in line
    assert 'spares' not in line


@pytest.mark.parametrize(
    ('changed', 'exact'),
    [({}, True), ({'lost': 3}, False), ({'lost': None}, False), ({'verified': None}, True)]
    + [({'verified': Verified(1, 36, ('experts.0 from iteration 36',))}, False)],
)
def test_launcher_colours_the_same_lines_as_a_worker(changed: dict, exact: bool) -> None:
    found = summary(**changed)
    assert found.is_exact is exact
    assert JobRecovered(found.line(NOW), '1 hot').nothing_lost is exact


def test_launcher_prints_the_line_with_its_own_time_and_spares() -> None:
    said = str(JobRecovered(summary().line(NOW), '1 hot'))
    assert said.startswith('RECOVERED at iteration 37 | rank 1 on node1')
    assert said.endswith('| spares left: 1 hot') and said.count('spares left') == 1


def test_ranks_that_died_together_are_listed_together() -> None:
    killed = [Gone(rank, 'n2', 'was killed by SIGKILL', 1.0 + rank) for rank in (8, 9, 10, 12)]
    said = deaths([*killed, Gone(3, 'n1', '')])
    first = time.strftime('%H:%M:%S', time.localtime(9.0))
    assert said == f'rank 3 on n1 died, ranks 8-10, 12 on n2 were killed by SIGKILL at {first}'
    many = deaths([Gone(rank, f'n{rank}', 'was lost') for rank in range(100)])
    assert many.endswith(' and 96 more') and many.count(' was lost') == 4


def test_verifications_of_ranks_are_summed_up() -> None:
    found = together([Verified(2, 5, ()), Verified(3, 7, ('b',)), Verified(0, -1, ())])
    assert found == Verified(5, 7, ('b',))


@pytest.mark.parametrize(
    ('error', 'said'),
    [
        (
            RuntimeError(
                '[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error '
                '[127.0.1.1]:3456: Connection reset by peer. This may be caused by a remote peer '
                'that crashed. GLHF! \U000f0000'
            ),
            'the connection to another rank is lost (gloo: Read error [127.0.1.1]:3456: Connection '
            'reset by peer.)',
        ),
        (
            RuntimeError('[../third_party/gloo/gloo/transport/tcp/pair.cc:1] Read error GLHF!\n x'),
            'the connection to another rank is lost (gloo: Read error)',
        ),
        (ConnectionError(), 'ConnectionError: no reason given'),
        (RuntimeError('mine\nmore'), 'RuntimeError: mine'),
        (
            RegroupError(f'The process group of ranks 0, 1 could not be connected: {NO_MEMORY}'),
            "RegroupError: no GPU memory for a communicator: Cuda failure 2 'out of memory'",
        ),
        (
            DistBackendError('NCCL error\nLast error:\nFailed to CUDA calloc async 4194304 bytes'),
            'DistBackendError: no GPU memory for a communicator: Failed to CUDA calloc async '
            '4194304 bytes',
        ),
        (
            torch.OutOfMemoryError('CUDA out of memory.\nTried to allocate'),
            'OutOfMemoryError: CUDA out of memory.',
        ),
    ],
)
def test_messages_of_libraries_are_no_headline(error: Exception, said: str) -> None:
    assert in_words(error) == said


@pytest.mark.parametrize(
    ('ended', 'said'),
    [
        (JobEnded(0, 7384.0, 2, 2), 'the job ended well after 2 h 03 min | workers lost: 2'),
        (JobEnded(143, 12.4, 0, 0), 'the job ended with exit status 143 after 12 s | workers lost'),
        (JobEnded(1, 75.0, 3, 2), 'the job ended with exit status 1 after 1 min 15 s'),
    ],
)
def test_a_launcher_has_a_last_line(ended: JobEnded, said: str) -> None:
    assert str(ended).startswith(said)
    assert str(ended).endswith(f'recoveries: {ended.recoveries}')
