# SPDX-License-Identifier: Apache-2.0
"""What workers tell their launcher."""

import os
from pathlib import Path

from torch.distributed import HashStore

from moevement_ext.launch.statements import tell_memory, told_memory


def test_the_directory_of_memory_may_have_any_bytes() -> None:
    store = HashStore()
    assert told_memory(store) is None
    directory = Path(os.fsdecode(b'/dev/shm/m\xfcller'))
    tell_memory(store, directory)
    assert told_memory(store) == directory
