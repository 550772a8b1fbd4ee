# SPDX-License-Identifier: Apache-2.0
"""Ways to end a job without a failure; called in each worker before `main`."""

import os
import signal
from collections.abc import Callable
from typing import Any

from megatron.core.rerun_state_machine import RerunDiagnostic, RerunState, RerunStateMachine
from megatron.training import get_args, training

from megatron.moevement.seams import patches


def an_hour_passes_in_iteration_6() -> None:
    """Upstream believes that training began an hour earlier."""

    def an_hour_ago() -> None:
        training._TRAIN_START_TIME -= 3600.0

    _in_iteration_6(an_hour_ago)


def an_hour_passes_until_a_new_worker_evaluates() -> None:
    """It tells the others, when it has evaluated a batch."""
    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':
        return

    def evaluate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        training._TRAIN_START_TIME -= 3600.0
        return original(*args, **kwargs)

    patches.wrap('megatron.training.training:evaluate_and_print_results', evaluate)


def terminated_in_iteration_6() -> None:
    """Rank 1 gets SIGTERM from outside, as from a batch system."""
    _signalled_in_iteration_6(signal.SIGTERM)


def notified_in_iteration_6() -> None:
    """Rank 1 gets SIGUSR1, with which a batch system announces a preemption."""
    _signalled_in_iteration_6(signal.SIGUSR1)


def _signalled_in_iteration_6(number: signal.Signals) -> None:
    def act() -> None:
        if os.environ['RANK'] == '1':
            os.kill(os.getpid(), number)

    _in_iteration_6(act)


def _in_iteration_6(act: Callable[[], None]) -> None:
    def train_step(original: Callable[..., Any], *args: Any, iteration: int, **kwargs: Any) -> Any:
        if iteration == 5:
            act()
        return original(*args, iteration=iteration, **kwargs)

    patches.wrap('megatron.training.training:train_step', train_step)


def large_gradients_in_iteration_8() -> None:
    """On rank 3; upstream runs the iteration a second time and goes on."""

    def unexpectedly_large(self: RerunStateMachine, *args: Any, **kwargs: Any) -> bool:
        first = self.state == RerunState.INITIAL_RUN
        return first and get_args().curr_iteration == 7 and os.environ['RANK'] == '3'

    RerunStateMachine.is_unexpectedly_large = unexpectedly_large


def result_refused_in_iteration_6() -> None:
    """The loss of a micro-batch on rank 1 fails validation, and has another value when repeated."""
    _refuse_in_iteration_6(RerunDiagnostic.TRANSIENT_ERROR)


def result_refused_in_iteration_6_again() -> None:
    """The same, but repeated with the same value; another device shall show which is right."""
    _refuse_in_iteration_6(RerunDiagnostic.PERSISTENT_ERROR)


def _refuse_in_iteration_6(diagnostic: RerunDiagnostic) -> None:
    validate = RerunStateMachine.validate_result

    def validated(self: RerunStateMachine, *args: Any, **kwargs: Any) -> None:
        injector = self.error_injector
        injector.error_injection_rate = 1
        injector.error_injection_type = diagnostic
        injector.should_inject_errors = self.current_iteration == 6 and os.environ['RANK'] == '1'
        validate(self, *args, **kwargs)

    RerunStateMachine.validate_result = validated
