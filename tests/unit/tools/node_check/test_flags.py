# SPDX-License-Identifier: Apache-2.0
import pytest

from tools.node_check import _split

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
