# SPDX-License-Identifier: Apache-2.0
"""What is in the store now."""

from collections.abc import Iterator, Sequence

from torch.distributed import Store

# No value of ours.
_NEVER = '\0'
# A proxy cuts a client to which it owes much, and others are served in between.
_READ_AT_ONCE = 256


def peek(store: Store, key: str) -> bytes | None:
    """The value of a key, None if it is not there; one request.

    Not for a key that others still wait for: torch's server would wake them up, as if it had come.
    `check` lets them sleep. `get` waits for the key, in two requests.
    """
    # A key that is not there stays so, and what was expected comes back.
    found = bytes(store.compare_set(key, _NEVER, _NEVER))
    return None if found == _NEVER.encode() else found


def read_in_parts(store: Store, keys: Sequence[str]) -> Iterator[bytes]:
    """The values of keys that are there, in order; one request for some of them at a time.

    No single answer then passes what a proxy owes a client, however many ranks the job has.
    """
    for at in range(0, len(keys), _READ_AT_ONCE):
        yield from store.multi_get(list(keys[at : at + _READ_AT_ONCE]))
