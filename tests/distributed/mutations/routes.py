# SPDX-License-Identifier: Apache-2.0
"""Ways to break the routes around guests. Every one must turn the bits red."""

from types import SimpleNamespace
from typing import Any

from megatron.moevement.state import handing_on, iteration_state
from megatron.moevement.state.routes import _Iteration
from tests.distributed.probes.guests import last_rank


def sums_handed_on_before_the_piece() -> None:
    last_rank()
    take_over, hand_on = _Iteration._take_over, _Iteration._hand_on
    taken: list[Any] = []

    def taking(self: Any, unit: int) -> Any:
        found = take_over(self, unit)
        taken[:] = [tensor.clone() for tensor in self._state.gradients]
        return found

    def handing(self: Any, unit: int, losses: Any) -> None:
        for tensor, before in zip(self._state.gradients, taken, strict=False):
            tensor.copy_(before)
        hand_on(self, unit, losses)

    _Iteration._take_over, _Iteration._hand_on = taking, handing


def random_state_not_handed_on() -> None:
    last_rank()
    handing_on.iteration_state = SimpleNamespace(
        capture_rng=iteration_state.capture_rng, restore_rng=lambda state: None
    )


def divisor_of_the_piece() -> None:
    last_rank()
    part = _Iteration._part

    def own_divisor(self: Any, data: object, number: int) -> Any:
        total, self._total = self._total, number
        try:
            return part(self, data, number)
        finally:
            self._total = total

    _Iteration._part = own_divisor


def other_order_of_hosts() -> None:
    """The guest's first micro-batches go to the last host."""
    last_rank()
    rank_of = _Iteration._rank_of
    have_computed = _Iteration._have_computed

    def reversed_data(self: Any) -> None:
        send, hosts = self._line.send, [rank_of(self, unit) for unit in self._hosts]

        def sending(peer: int, message: object) -> None:
            is_data = isinstance(message, list)
            send(hosts[-1 - hosts.index(peer)] if is_data else peer, message)

        self._line.send = sending
        have_computed(self)

    _Iteration._have_computed = reversed_data


def piece_on_stale_weights() -> None:
    """A host computes the guest's micro-batches with the weights of an iteration before."""
    last_rank()
    part = _Iteration._part
    before: list[Any] = []

    def stale(self: Any, data: object, number: int) -> Any:
        if data is self._data:
            return part(self, data, number)
        weights = [one.data for chunk in self._model for one in chunk.parameters()]
        present = [weight.clone() for weight in weights]
        for weight, old in zip(weights, before or present, strict=True):
            weight.copy_(old)
        try:
            return part(self, data, number)
        finally:
            for weight, new in zip(weights, present, strict=True):
                weight.copy_(new)
            before[:] = present

    _Iteration._part = stale
