# SPDX-License-Identifier: Apache-2.0
"""What is in the store now."""

from torch.distributed import Store

# No value of ours.
_NEVER = '\0'


def peek(store: Store, key: str) -> bytes | None:
    """The value of a key, None if it is not there; one request.

    Not of one that is not there yet and that others wait for: torch's server wakes them up for
    this, as if it had come. `check` lets them sleep.

    `get` waits for the key, and is two; `check` before it makes three.
    """
    # A key that is not there stays so, and what was expected comes back.
    found = bytes(store.compare_set(key, _NEVER, _NEVER))
    return None if found == _NEVER.encode() else found
