# SPDX-License-Identifier: Apache-2.0
"""The first layout that fits the number of ranks is taken; if none does, it is said of each why."""

from collections.abc import Sequence

import pytest

from megatron.moevement.job.layout_choice import FLAG, fitted
from moevement_ext.config import ConfigurationError

FLAGS = (
    '--num-layers 4 --num-experts 4 --micro-batch-size 1 --global-batch-size 8 '
    '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2'
).split()


def enough(flags: Sequence[str]) -> str | None:
    return None


def sizes(ranks: int, layouts: str, *more: str) -> dict[str, int]:
    added = fitted([*FLAGS, *more, FLAG, layouts], ranks, enough)
    return dict(zip(added[::2], map(int, added[1::2]), strict=True))


def test_flags_that_fit_stay() -> None:
    assert sizes(4, 'ep=4') == sizes(8, 'ep=4') == {}
    assert fitted(FLAGS, 3, enough) == []  # nothing is chosen without the flag


def test_the_first_that_fits_is_taken() -> None:
    assert sizes(2, 'ep=4;ep=2;pp=2') == {
        '--pipeline-model-parallel-size': 1,
        '--expert-model-parallel-size': 2,
        '--context-parallel-size': 1,
        '--num-distributed-optimizer-instances': 1,
    }
    assert sizes(1, 'ep=2;;pp=1')['--expert-model-parallel-size'] == 1


@pytest.mark.parametrize(
    ('ranks', 'layouts', 'why'),
    [
        (3, 'pp=1', r'3 ranks are not divided by 2.*8 samples of a batch are not divided by 3'),
        (9, 'pp=3,ep=3', '4 layers are not divided by 3'),
        (6, 'ep=3', '4 experts are not divided by 3'),
        (2, 'instances=4', '2 data-parallel ranks are not divided by 4'),
    ],
)
def test_why_none_fits(ranks: int, layouts: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        sizes(ranks, layouts)


@pytest.mark.parametrize('layouts', ['pp', 'pp=0', 'tp=2', 'pp=two'])
def test_layouts_that_are_none(layouts: str) -> None:
    with pytest.raises(ConfigurationError, match='give sizes of pp, ep, cp, instances'):
        sizes(2, layouts)


def test_stages_may_have_different_numbers_of_layers() -> None:
    assert sizes(2, 'pp=2', '--num-layers', '5', '--decoder-first-pipeline-num-layers', '2')
