# SPDX-License-Identifier: Apache-2.0
import pytest

from tools.node_check import RankReport, _parser, _planned_bytes, _split

MODEL = ['--num-layers', '32', '--hidden-size', '4096']


@pytest.mark.parametrize(
    ('given', 'own'),
    [
        ([], []),
        (['--need-gib', '300'], ['--need-gib', '300']),
        (['--need-gib', '300', '--', *MODEL], ['--need-gib', '300']),
        (['--', *MODEL], []),
        (MODEL, []),  # torchrun has dropped the `--`
    ],
)
def test_flags_of_the_training_are_separated(given: list[str], own: list[str]) -> None:
    assert _split(given) == (own, MODEL if '--num-layers' in given else [])


@pytest.mark.parametrize('size', ['nan', 'inf', '-1', 'much'])
def test_memory_is_a_finite_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(['--need-gib', size])
    assert '--need-gib' in capsys.readouterr().err


def test_windows_are_planned_for_the_memory_of_the_nodes() -> None:
    """As in a training: `auto` takes the longest windows that fit, else shorter ones."""
    flags = (
        '--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --bf16 '
        '--num-experts 16 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 8'
    ).split()

    def needed(free: int) -> int:
        reports = [
            RankReport(rank, f'node{rank // 2}', {}, {}, free, True, 1.0, 1.0) for rank in range(4)
        ]
        return _planned_bytes(0, flags, reports)

    enough = needed(1 << 40)
    assert enough // 2 < needed(enough - 1) < enough
