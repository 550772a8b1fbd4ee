# SPDX-License-Identifier: Apache-2.0
"""The first fitting layout is taken; if none fits, the error says why for each."""

from collections.abc import Sequence

import pytest

from megatron.moevement.job.layout_choice import FLAG, LayoutSizes, fitted
from moevement_ext.config import ConfigurationError

FLAGS = (
    '--num-layers 4 --num-experts 4 --micro-batch-size 1 --global-batch-size 8 '
    '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2'
).split()


def enough(flags: Sequence[str], ranks: int) -> str | None:
    return None


def sizes(ranks: int, layouts: str, *more: str) -> dict[str, int]:
    trained, added = fitted([*FLAGS, *more, FLAG, layouts], ranks, enough)
    assert trained == ranks, 'some would not train'
    return dict(zip(added[::2], map(int, added[1::2]), strict=True))


def test_fitting_flags_are_kept() -> None:
    assert sizes(4, 'ep=4') == sizes(8, 'ep=4') == {}
    assert fitted(FLAGS, 3, enough) == (3, [])  # without the flag, no layout is chosen
    assert LayoutSizes(micro_batch=2).misfit(3) is None, 'a batch has samples for all ranks'


def test_flags_that_upstream_refuses_choose_no_layout() -> None:
    refused = ['--help', '--num-layers', 'many']
    assert fitted([*FLAGS, FLAG, 'ep=4', *refused], 3, enough) == (3, [])


def test_first_fitting_layout_is_taken() -> None:
    assert sizes(2, 'ep=4;ep=2;pp=2') == {
        '--pipeline-model-parallel-size': 1,
        '--expert-model-parallel-size': 2,
        '--context-parallel-size': 1,
        '--num-distributed-optimizer-instances': 1,
    }
    assert sizes(1, 'ep=2;;pp=1')['--expert-model-parallel-size'] == 1


@pytest.mark.parametrize(
    ('started', 'layouts', 'train', 'expert'),
    [
        (3, 'ep=2', 2, 2),
        (5, 'ep=2', 4, None),  # the layout of the flags
        (7, 'ep=2;ep=4', 4, None),
        (9, 'pp=3,ep=3', 8, None),
        (3, 'pp=1', 2, 1),
        (3, 'pp=1,ep=3', 2, None),
    ],
)
def test_largest_fitting_number_of_ranks_trains(
    started: int, layouts: str, train: int, expert: int | None
) -> None:
    flags = [*FLAGS, FLAG, layouts]
    if train == 2 and expert is None:
        flags += ['--pipeline-model-parallel-size', '1', '--expert-model-parallel-size', '1']
    trained, added = fitted(flags, started, enough)
    sizes = dict(zip(added[::2], added[1::2], strict=True))
    found = sizes.get('--expert-model-parallel-size')
    assert (trained, found) == (train, None if expert is None else str(expert))


@pytest.mark.parametrize(
    ('ranks', 'layouts', 'why'),
    [
        (
            1,
            'pp=2',
            'fits 1 ranks, or fewer: pp=2,ep=2,cp=1,instances=1: 1 ranks are not divisible by 2',
        ),
        (
            2,
            'pp=3,ep=3',
            r'pp=2,ep=2.*not divisible by 4; pp=3,ep=3.*2 ranks are not divisible by 3',
        ),
        (3, 'ep=8', '3 ranks are not divisible by 8'),
        (3, 'pp=3', '4 layers are not divisible by 3'),
        (3, 'ep=3', '4 experts are not divisible by 3'),
        (2, 'ep=2,instances=2', '1 data-parallel ranks of experts are not divisible by 2'),
        (2, 'instances=4', '2 data-parallel ranks are not divisible by 4'),
    ],
)
def test_error_says_why_no_layout_fits(ranks: int, layouts: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        fitted([*FLAGS, FLAG, layouts], ranks, enough)


@pytest.mark.parametrize('layouts', ['pp', 'pp=0', 'tp=2', 'pp=two'])
def test_invalid_layouts_are_refused(layouts: str) -> None:
    with pytest.raises(ConfigurationError, match='give sizes of pp, ep, cp, instances'):
        sizes(2, layouts)


def test_uneven_pipeline_stages_are_accepted() -> None:
    assert sizes(2, 'pp=2', '--num-layers', '5', '--decoder-first-pipeline-num-layers', '2')


def test_expert_tensor_parallel_size_is_set_only_if_given() -> None:
    dense = ['--tensor-model-parallel-size', '2', '--pipeline-model-parallel-size', '1']
    flag = '--expert-tensor-parallel-size'
    assert flag not in sizes(2, 'ep=1', *dense)
    assert sizes(2, 'ep=2,etp=1', *dense)[flag] == 1
    assert sizes(2, 'ep=1', *dense, flag, '2')[flag] == 2
