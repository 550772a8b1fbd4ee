# SPDX-License-Identifier: Apache-2.0
"""Closed forms by hand."""

import math

import pytest

from tools.simulate.closed_form import Dense, Sparse


def test_dense_costs_match_a_hand_calculation() -> None:
    system = Dense(3.12, 150, 0.345, 15.0, 450.0)
    period = 450 * math.exp(15 / 450) * (math.exp(519.75 / 450) - 1)
    assert system.ettr_exact() == pytest.approx(468 / period)
    assert system.expected_recovery_s() == pytest.approx(249)
    assert system.ettr_first_order() == pytest.approx(3.12 / 3.465 / (1 + 249 / 450))


def test_sparse_costs_of_window_2_match_a_hand_calculation() -> None:
    system = Sparse(2.0, 2, 0.5, 3.0, 100.0, local_saving=0.25, frozen_saving=0.4)
    # Conversion: one iteration half frozen (0.8 of the work) and one active, each 1.5 s.
    after_first, after_second = 3 + 1.5 * 1.8, 3 + 1.5 * 2.8
    attempt = 100 * (math.exp(0.025) - 1)
    window = attempt * (math.exp(after_first / 100) + math.exp(after_second / 100))
    assert system.ettr_exact() == pytest.approx(4 / window)
    assert system.recovery_s() == pytest.approx([after_first, after_second])
    assert system.expected_recovery_s() == pytest.approx((after_first + after_second) / 2 + 1)
