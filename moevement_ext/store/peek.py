# SPDX-License-Identifier: Apache-2.0
"""Reads keys of the store without waiting for them."""

from collections.abc import Iterator, Sequence

from torch.distributed import Store

# A value that the engine never stores.
_NEVER = '\0'
# The store serves no other client while it collects an answer.
_READ_AT_ONCE = 256


def peek(store: Store, key: str) -> bytes | None:
    """The value of a key, None if it is not set; costs one request.

    Must not be used for a key that other clients wait for: torch's server would wake them up, as if
    the key were set. `check` does not wake them. `get` waits for the key, and costs two requests.
    """
    # On a missing key, compare_set changes nothing, and returns the expected value.
    found = bytes(store.compare_set(key, _NEVER, _NEVER))
    return None if found == _NEVER.encode() else found


def read_in_parts(store: Store, keys: Sequence[str]) -> Iterator[bytes]:
    """The values of existing keys, in order, with one request per part of the keys.

    So other clients are served in between, however many ranks the job has.
    """
    for at in range(0, len(keys), _READ_AT_ONCE):
        yield from store.multi_get(list(keys[at : at + _READ_AT_ONCE]))
