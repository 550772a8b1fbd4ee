# SPDX-License-Identifier: Apache-2.0
"""Iteration times of a layout of stages, against vectors worked out by hand."""

import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.timers import Timers
from megatron.training.arguments import _print_args
from msgspec.structs import replace

from tools.model.description import DescriptionError
from tools.simulate.iteration import (
    Collective,
    StageProfile,
    iteration_of,
    read_stages,
    slowest_s,
)

PROFILE = StageProfile(
    'moevement-stages/1',
    ((1.0, 1.0, 2.0), (2.0, 2.0, 2.0)),
    micro_batches=4,
    sync_s=0.5,
    update_s=0.25,
)
UNEVEN = StageProfile('moevement-stages/1', ((5.0,), (8.0,), (9.0,)), 1, layers=(2, 4, 3))


def test_iteration_matches_a_hand_calculation() -> None:
    found = iteration_of(PROFILE)
    assert found['stage_s'] == (1, 2)
    assert found['pipeline_s'] == (4 + 2 - 1) * 2
    assert found['iteration_s'] == 10 + 0.5 + 0.25
    assert found['bubble'] == 1 / 5
    # One time in six a stage takes twice as long; the second one then takes 4, else all take 2.
    assert found['stragglers_s'] == pytest.approx(5 * (4 / 6 + 2 * 5 / 6) - 10)
    assert iteration_of(PROFILE, micro_batches=19)['pipeline_s'] == 40
    halved = iteration_of(replace(PROFILE, chunks=2))
    assert (halved['pipeline_s'], halved['bubble']) == (9, 0.5 / 4.5)


def test_layers_of_other_stages_match_a_hand_calculation() -> None:
    # A layer takes 2 (second stage); 1 more is the embedding, 3 more the head.
    assert UNEVEN.stage_s((3, 3, 3)).tolist() == [7, 6, 9]
    assert UNEVEN.stage_s((9,)).tolist() == [22]
    assert UNEVEN.stage_s((0, 9, 0)).tolist() == [1, 18, 3]
    assert iteration_of(UNEVEN, (3, 4, 2), 10)['pipeline_s'] == (10 + 2) * 8
    assert iteration_of(UNEVEN, (2, 4, 3))['stage_s'] == (5, 8, 9), 'as measured'


def test_collectives_match_a_hand_calculation() -> None:
    def fit(*measured: tuple[float, float]) -> list[float]:
        return list(Collective(measured).fit('x').values())

    exact = fit(*((size, 1e-4 + size / 1e10) for size in (1e6, 2e6, 4e6)))
    assert exact == pytest.approx((1e-4, 1e10))
    # Normal equations of (0, 1), (1, 2), (2, 2): 7/6 + 1/2 b.
    assert fit((0, 1), (1, 2), (2, 2)) == pytest.approx((7 / 6, 2))
    # Its line would begin at -1; through the origin the slope is (1 + 6) / (1 + 4).
    assert fit((1, 1), (2, 3)) == pytest.approx((0, 5 / 7))
    calls = Collective(((1.0, 3.0), (2.0, 4.0)), (10.0, 20.0))
    profile = replace(PROFILE, collectives={'all_reduce': calls})
    assert iteration_of(profile)['sync_s'] == pytest.approx(0.5 + (2 + 10) + (2 + 20))


@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    st.lists(st.floats(0.5, 3), min_size=1, max_size=4),
)
def test_the_slowest_stage_is_the_mean_over_all_draws(
    times: list[float], slow: list[float]
) -> None:
    draws = np.array(np.meshgrid(*[slow] * len(times))).reshape(len(times), -1)
    expected = (draws * np.array(times)[:, None]).max(axis=0).mean()
    assert slowest_s(np.array(times), np.sort(slow)) == pytest.approx(expected)


def of_upstream(monkeypatch: pytest.MonkeyPatch, times: dict[str, list[float]]) -> str:
    """What Megatron writes of timers, milliseconds by rank."""
    timers = Timers(2, 'all')
    seconds = torch.tensor(list(times.values())).T / 1000
    monkeypatch.setattr(timers, '_get_elapsed_time_all_ranks', lambda *_: seconds)
    monkeypatch.setattr(torch.distributed, 'get_world_size', lambda: len(seconds))
    text = timers.get_all_timers_string(list(times))
    assert isinstance(text, str)
    return text


def test_log_of_a_run_gives_its_stages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Four ranks in two stages; upstream itself writes what is read."""
    given = Namespace(
        rank=0, num_layers=6, pipeline_model_parallel_size=2, micro_batch_size=2,
        global_batch_size=16, data_parallel_size=2, virtual_pipeline_model_parallel_size=None,
        decoder_first_pipeline_num_layers=None,
    )  # fmt: skip
    _print_args('arguments', given)
    pieces = [capsys.readouterr().out, of_upstream(monkeypatch, {'setup': [1.0, 2, 3, 4]}) + '\n']
    for warm in (1000, 500, 0, 0, 4):
        pieces.append(' [2026-01-31 23:59:58] iteration 1/ 5 | lm loss: 5.0 |\n')
        pieces.append(of_upstream(monkeypatch, {
            'forward-compute': [40.0 + warm, 44, 80, 84], 'backward-compute': [80, 80, 160, 160],
            'all-grads-sync': [5, 6, 7, 8], 'optimizer': [10, 12, 10, 10],
        }) + '\nevaluated\n     rank  0: 7.00\n')  # fmt: skip
    pieces += [of_upstream(monkeypatch, {'save-checkpoint': [9.0] * 4}), '\n', pieces[-1][:150]]
    path = tmp_path / 'train.log'
    path.write_text(''.join(pieces))
    found = read_stages(path)
    assert (found.layers, found.micro_batches, found.chunks) == ((3, 3), 4, 1)
    assert found.micro_batch_s[0] == pytest.approx((0.031,) * 3)
    assert found.micro_batch_s[1] == pytest.approx((0.061,) * 3)
    assert (found.sync_s, found.update_s) == pytest.approx((0.008, 0.012))
    assert iteration_of(found)['iteration_s'] == pytest.approx(5 * 0.061 + 0.02)
    for text in (re.sub(r'(pipeline_\w+ \.+) 2', r'\1 3', ''.join(pieces)), pieces[0]):
        path.write_text(text)
        with pytest.raises(DescriptionError):
            read_stages(path)
