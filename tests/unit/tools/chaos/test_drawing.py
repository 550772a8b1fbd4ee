# SPDX-License-Identifier: Apache-2.0
"""What a seed draws: faults, windows, configurations."""

from pathlib import Path

import pytest

from moevement_ext.config import REPORT, STOP
from tools.chaos.configuration import (
    ASYNC_SAVE,
    AUTO,
    BF16,
    FEATURES,
    NARROW,
    SAVE,
    WIDE,
    Configuration,
    draw_configuration,
    draw_without_spares,
    parse_layout,
)
from tools.chaos.drawing import draw_faults
from tools.chaos.injecting import AT_COORDINATOR
from tools.lab import precisions
from tools.lab.job import Kind
from tools.lab.launch import PROGRAM, Launcher

MOVES = (Kind.AWAY, Kind.BACK)
KINDS = [kind for kind in Kind if kind not in (*MOVES, *AT_COORDINATOR)]
FAULTS = ['node   rank 0', 'double ranks 3, 0', 'agent  rank 3']
CONFIGURATION = (
    'pp2-ep2 fp32, window 5, 4 nodes, replicas 2, spares 0, local, verify stop, disk: evaluation, '
    'dense-save, dropout, router-jitter, recompute, loader-workers, tensorboard, ramp-up'
)


def drawn(seed: int, narrow: bool = False) -> list[Configuration]:
    return [draw_configuration(seed, number, narrow=narrow) for number in range(20)]


def test_a_seed_stands_for_the_same_draws() -> None:
    assert draw_faults(7, 30, KINDS, 2, 2) == draw_faults(7, 30, KINDS, 2, 2)
    assert draw_faults(7, 30, KINDS, 2, 2) != draw_faults(8, 30, KINDS, 2, 2)
    assert drawn(3) == drawn(3) != drawn(4)
    # Seeds in the documents and in other tests stand for these.
    assert [str(fault) for fault in draw_faults(1, 3, KINDS, 4, 1, job=1)] == FAULTS
    assert str(draw_configuration(35136, 0)) == CONFIGURATION


@pytest.mark.parametrize('kinds', [KINDS, [Kind.KILL], [Kind.NODE]])
def test_no_two_faults_are_equal(kinds: list[Kind]) -> None:
    faults = draw_faults(3, 60, kinds, 2, 1)
    assert len({(fault.kind, fault.victims, fault.after) for fault in faults}) == 60
    assert {fault.kind for fault in faults} == set(kinds)


def test_victims_match_the_kind_of_fault() -> None:
    for fault in draw_faults(5, 200, [*KINDS, *AT_COORDINATOR], 2, 2):
        match fault.kind:
            case Kind.NODE:
                assert fault.victims in ((0, 1), (2, 3))
            case Kind.DOUBLE:
                assert len(fault.victims) == 2
                assert fault.apart_s or fault.victims[0] != fault.victims[1]
            case Kind.WHOLE | Kind.JOB:
                assert fault.victims == (0, 1, 2, 3)
            case _:
                assert len(fault.victims) == 1 and (fault.victims[0] or fault.kind != Kind.AGENT)
        assert set(fault.victims) <= set(range(4))
        assert fault.kind in (Kind.DOUBLE, *AT_COORDINATOR) or not fault.apart_s


def test_nodes_without_spares_are_lost_and_return() -> None:
    for number in range(12):
        one = draw_without_spares(4, number)
        away: set[int] = set()
        for fault in draw_faults(4, 40, one.kinds(), one.nodes, 1, number, one.replicas):
            if fault.kind is Kind.AWAY:
                assert away.isdisjoint(fault.victims)
                away.update(fault.victims)
            elif fault.kind is Kind.BACK:
                away.remove(fault.victims[0])
            assert len(away) <= one.replicas, 'a window may have no copy left'
    layouts = [draw_without_spares(4, number).layout for number in range(6)]
    assert len(set(layouts)) == 6 and {one.ranks for one in layouts} == {4}
    assert {*MOVES, Kind.WHOLE} < {*one.kinds()} and not {Kind.JOB, Kind.STUCK} & {*one.kinds()}


@pytest.mark.parametrize('seed', range(0, 20, 5))
def test_twenty_configurations_have_everything_that_is_supported(seed: int) -> None:
    found = drawn(seed)
    assert {feature for one in found for feature in one.features} == set(FEATURES)
    assert {one.precision for one in found} == set(WIDE)
    assert {one.launcher for one in found} == set(Launcher)
    assert {(one.verify, one.disk) for one in found} >= {(STOP, False), (REPORT, False)}
    assert {one.disk for one in found} == {True, False}
    assert {one.window for one in found} == {1, 2, 3, 4, 5, 6, AUTO}
    layouts = {one.layout.name for one in found}
    assert layouts >= {'pp2-ep2', 'pp4', 'pp2-dp2', 'pp2-ep2-vp2', 'pp2-tp2', 'pp3', 'ep2'}
    for one in found:
        assert not {SAVE, ASYNC_SAVE} <= set(one.features)
        assert one.nodes * one.workers_per_node == one.layout.ranks
        assert 1 <= one.replicas < one.nodes
        assert one.layout.dp <= one.layout.ep or one.precision != BF16, 'its ranks share no state'
        agents = one.launcher is Launcher.TORCHRUN
        assert not agents or (one.workers_per_node, one.spares) == (1, 0)
        assert (Kind.AGENT in one.kinds()) == agents


@pytest.mark.parametrize('seed', range(3))
def test_half_of_the_configurations_have_narrow_state_if_available(seed: int) -> None:
    found = drawn(seed, narrow=True)
    assert sorted(one.precision for one in found if one.precision in NARROW) == sorted(2 * NARROW)
    for one, other in zip(found, drawn(seed), strict=True):
        if one.precision not in NARROW:
            assert one == other
            continue
        assert not {SAVE, ASYNC_SAVE, 'recompute'} & set(one.features)
        assert one.layout.tp == one.layout.vp == 1
        assert one.nodes * one.workers_per_node == one.layout.ranks


def test_narrow_state_is_trained_on_stand_ins_if_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Configuration(parse_layout('pp4'), 'c4', (), 3, 4)
    flags = ' '.join(one.training_flags(Path('text'), 50, Path('run')))
    assert '--fp8-param-gather' in flags and '--main-params-dtype fp16' in flags
    assert one.launch(Path('run'), []).program_file == precisions.STAND_INS
    assert one._replace(precision=BF16).launch(Path('run'), []).program_file == PROGRAM
    monkeypatch.setattr('importlib.util.find_spec', lambda name: object())
    real = one._replace(share_gpu=True)
    assert real.launch(Path('run'), []).program_file == PROGRAM
    assert 'transformer_engine' in real.training_flags(Path('text'), 50, Path('run'))
