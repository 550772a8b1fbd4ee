# SPDX-License-Identifier: Apache-2.0
"""Auxiliary state of a loop on plain torch: all state before an iteration except operators."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from moevement_ext.capture.trainer_state import (
    GeneratorStates,
    capture_generators,
    restore_generators,
)
from moevement_ext.config import ConfigurationError
from moevement_ext.logger import logger_of
from moevement_ext.memory.tensors import decoded, dtype_name, dtype_of, encoded

logger = logger_of(__name__)

_SPARE_BYTES = 4096


class _Encoded(msgspec.Struct, array_like=True):
    iteration: int
    reduced: list[float]
    generators: GeneratorStates
    loop: Any


@dataclass(eq=False)
class LoopState:
    """Counters, random number generators, and the loop's own state. Training thread only.

    Args:
        state_dict: returns the loop's state: numbers, strings, bytes, lists, dicts, small tensors.
        load_state_dict: its inverse.
        state_bytes: upper bound of the encoded state of a loop whose state grows; 0: room for twice
            the first state.

    Attributes:
        iteration: number of committed iterations.
        reduced: values reduced over all ranks in the newest iteration.
    """

    _state_dict: Callable[[], Any]
    _load_state_dict: Callable[[Any], None]
    state_bytes: int = 0

    def __post_init__(self) -> None:
        self._bound: int | None = None
        self.iteration = 0
        self.reduced: list[float] = []
        self._generators: GeneratorStates | None = None  # of training, between two iterations

    @property
    def max_bytes(self) -> int:
        """Upper bound of the encoded size: room for `state_bytes`, or for the state to double."""
        present = len(self.now())
        self._bound = present + max(present, self.state_bytes) + _SPARE_BYTES
        return self._bound

    def now(self) -> bytes:
        """Return the encoded state; between iterations with the generator states of training."""
        generators = self._generators or _capture()
        present = _Encoded(self.iteration, self.reduced, generators, self._state_dict())
        try:
            state = msgspec.msgpack.encode(present, enc_hook=_encode)
        except OverflowError as error:
            raise ConfigurationError(
                'state_dict() holds an integer of more than 64 bits; give it as a string or bytes.'
            ) from error
        if self._bound is not None and len(state) > self._bound:
            _log_too_large(len(state), self._bound)
            self._bound = None
        return state

    def begins(self) -> bytes:
        """Start an iteration: undo random draws since the last iteration; return `now`."""
        if self._generators is not None:
            restore_generators(self._generators)
        return self.now()

    def committed(self) -> bytes:
        """End an iteration after its update; return `now`."""
        self._generators = _capture()
        return self.now()

    def restore(self, state: bytes) -> None:
        """Restore the state; the inverse of `now`."""
        found = _decode(state)
        self.iteration, self.reduced = found.iteration, found.reduced
        self._load_state_dict(found.loop)
        self._generators = found.generators
        restore_generators(found.generators)

    def move_data(self, state: bytes) -> None:
        """Do nothing: the iteration or the loop's own state determines the batches."""

    def set_counters(self, state: bytes, validation: bytes | None = None) -> None:
        self.iteration = _decode(state).iteration

    def count(self, iteration: int, samples: int | None, validation: int | None = None) -> None:
        self.iteration = iteration

    @staticmethod
    def reduced_in(state: bytes) -> list[float]:
        """Return the values reduced over all ranks in the step that led to `state`."""
        return _decode(state).reduced


def _log_too_large(nbytes: int, bound: int) -> None:
    logger.warning(
        'state_dict() of the loop has grown: the state of an iteration takes %d bytes, and '
        'windows have room for %d. TRAINING IS UNPROTECTED while no window has room for it; set '
        'state_bytes of the trainer to the largest size of that state',
        nbytes,
        bound,
    )


def _capture() -> GeneratorStates:
    return capture_generators(on_device=torch.cuda.is_available())


def _decode(state: bytes) -> _Encoded:
    return _ENCODED.decode(state)


def _encode(value: object) -> object:
    if isinstance(value, torch.Tensor) and dtype_of(dtype_name(value.dtype)) is not None:
        return encoded(value)
    if isinstance(value, np.generic):
        return value.item()
    raise ConfigurationError(
        f'state_dict() holds a {type(value).__name__}: {value!r:.80}. Give numbers, strings, '
        'bytes, lists, dicts and tensors (of other types as torch.uint8).'
    )


_ENCODED = msgspec.msgpack.Decoder(_Encoded, ext_hook=decoded)
