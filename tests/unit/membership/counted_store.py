# SPDX-License-Identifier: Apache-2.0
"""A connection to the launcher's store that counts its traffic."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import Store


class Traffic(NamedTuple):
    """Traffic between some ranks and the store."""

    requests: int = 0
    nbytes: int = 0
    """Bytes of keys and values, both ways."""
    largest: int = 0
    """Bytes of the largest value."""


class Tally:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traffic = Traffic()
        self.connections: list[Store] = []
        """Keeps all connections alive: torch references only the C++ part of a store."""

    def add(self, requests: int, keys: Sequence[str | bytes], values: Sequence[bytes] = ()) -> None:
        """Note what one call has sent and received."""
        nbytes = sum(map(len, keys)) + sum(map(len, values))
        with self._lock:
            before = self._traffic
            largest = max(map(len, values), default=0)
            self._traffic = Traffic(
                before.requests + requests, before.nbytes + nbytes, max(before.largest, largest)
            )

    def read(self) -> Traffic:
        with self._lock:
            return self._traffic


class CountedStore(Store):
    """Counts the requests that torch 2.15 sends: reading a value waits for it first."""

    def __init__(self, store: Store, tally: Tally) -> None:
        super().__init__()
        self._store = store
        self._tally = tally
        tally.connections.append(self)

    def clone(self) -> 'CountedStore':
        return CountedStore(self._store.clone(), self._tally)

    def set(self, key: str, value: Any) -> None:
        self._tally.add(1, [key], [_bytes(value)])
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._tally.add(2, [key, key], [value])
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._tally.add(2, keys + keys, values)
        return values

    def add(self, key: str, value: int) -> int:
        self._tally.add(1, [key])
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self._tally.add(1, keys)
        return self._store.check(keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        found = self._store.compare_set(key, expected, desired)
        self._tally.add(1, [key], [_bytes(expected), _bytes(desired), found])
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._tally.add(1, keys)
        self._store.wait(keys, *([] if timeout is None else [timeout]))

    def delete_key(self, key: str) -> bool:
        self._tally.add(1, [key])
        return self._store.delete_key(key)

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - a `PrefixStore` calls it by this name
        return self.delete_key(key)

    def list_keys(self) -> list[str]:
        keys = self._store.list_keys()
        self._tally.add(1, keys)
        return keys

    def has_extended_api(self) -> bool:
        return True


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
