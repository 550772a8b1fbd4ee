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
    parse_layout,
)
from tools.chaos.drawing import draw_faults
from tools.lab import precisions
from tools.lab.job import Kind
from tools.lab.launch import PROGRAM, Launcher

KINDS = list(Kind)


class TestFaults:
    def test_a_seed_stands_for_the_same_faults(self) -> None:
        assert draw_faults(7, 30, KINDS, 2, 2) == draw_faults(7, 30, KINDS, 2, 2)
        assert draw_faults(7, 30, KINDS, 2, 2) != draw_faults(8, 30, KINDS, 2, 2)

    @pytest.mark.parametrize('kinds', [KINDS, [Kind.KILL], [Kind.NODE]])
    def test_no_two_faults_are_equal(self, kinds: list[Kind]) -> None:
        faults = draw_faults(3, 60, kinds, 2, 1)
        assert len({(fault.kind, fault.victims, fault.after) for fault in faults}) == 60
        assert {fault.kind for fault in faults} == set(kinds)

    def test_victims_match_the_kind_of_fault(self) -> None:
        for fault in draw_faults(5, 200, KINDS, 2, 2):
            match fault.kind:
                case Kind.NODE:
                    assert fault.victims in ((0, 1), (2, 3)) and not fault.apart_s
                case Kind.DOUBLE:
                    assert len(fault.victims) == 2
                    assert fault.apart_s or fault.victims[0] != fault.victims[1]
                case Kind.WHOLE | Kind.JOB:
                    assert fault.victims == (0, 1, 2, 3)
                case Kind.AGENT:
                    assert len(fault.victims) == 1 and fault.victims[0] > 0
                case _:
                    assert len(fault.victims) == 1 and not fault.apart_s
            assert set(fault.victims) <= set(range(4))
            assert fault.after >= 0 and 0.0 <= fault.phase <= 2.0


class TestConfiguration:
    def drawn(self, seed: int) -> list[Configuration]:
        return [draw_configuration(seed, number) for number in range(20)]

    def test_a_seed_stands_for_the_same_configurations(self) -> None:
        assert self.drawn(3) == self.drawn(3) != self.drawn(4)

    @pytest.mark.parametrize('seed', range(0, 20, 5))
    def test_twenty_configurations_have_all_layouts_precisions_and_features(
        self, seed: int
    ) -> None:
        drawn = self.drawn(seed)
        assert {feature for one in drawn for feature in one.features} == set(FEATURES)
        assert {one.precision for one in drawn} == set(WIDE)
        assert {one.launcher for one in drawn} == set(Launcher)
        assert {(one.verify, one.disk) for one in drawn} >= {(STOP, False), (REPORT, False)}
        assert {one.disk for one in drawn} == {True, False}
        assert {one.window for one in drawn} == {1, 2, 3, 4, 5, 6, AUTO}
        layouts = {one.layout.name for one in drawn}
        assert layouts >= {'pp2-ep2', 'pp4', 'pp2-dp2', 'pp2-ep2-vp2', 'pp2-tp2', 'pp3', 'ep2'}

    @pytest.mark.parametrize('seed', range(0, 20, 5))
    def test_features_are_drawn_only_with_supported_layouts(self, seed: int) -> None:
        for one in self.drawn(seed):
            assert not {SAVE, ASYNC_SAVE} <= set(one.features)
            assert one.nodes * one.workers_per_node == one.layout.ranks
            assert 1 <= one.replicas < one.nodes
            if one.layout.dp > one.layout.ep:
                assert one.precision != BF16, 'its ranks share no state'
            if one.launcher is Launcher.TORCHRUN:
                assert one.workers_per_node == 1 and one.spares == 0
            else:
                assert Kind.AGENT not in one.kinds()

    @pytest.mark.parametrize('seed', range(3))
    def test_half_of_the_configurations_have_narrow_state_if_available(self, seed: int) -> None:
        wide = self.drawn(seed)
        drawn = [draw_configuration(seed, number, narrow=True) for number in range(20)]
        assert sorted(one.precision for one in drawn if one.precision in NARROW) == sorted(
            2 * [*NARROW]
        )
        for one, other in zip(drawn, wide, strict=True):
            if one.precision not in NARROW:
                assert one == other
                continue
            assert not {SAVE, ASYNC_SAVE, 'recompute'} & set(one.features)
            assert one.layout.tp == one.layout.vp == 1
            assert one.nodes * one.workers_per_node == one.layout.ranks

    def test_narrow_state_is_trained_on_stand_ins_if_on_a_cpu(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = Configuration(parse_layout('pp4'), 'c4', (), 3, 4)
        flags = ' '.join(one.training_flags(Path('text'), 50, Path('run')))
        assert '--fp8-param-gather' in flags and '--main-params-dtype fp16' in flags
        assert one.launch(Path('run'), []).program_file == precisions.STAND_INS
        wide = one._replace(precision=BF16)
        assert wide.launch(Path('run'), []).program_file == PROGRAM
        monkeypatch.setattr('importlib.util.find_spec', lambda name: object())
        real = one._replace(share_gpu=True)
        assert real.launch(Path('run'), []).program_file == PROGRAM
        assert 'transformer_engine' in real.training_flags(Path('text'), 50, Path('run'))
