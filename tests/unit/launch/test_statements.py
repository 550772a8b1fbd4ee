# SPDX-License-Identifier: Apache-2.0
"""What workers tell their launcher."""

import os
from datetime import timedelta
from pathlib import Path

from torch.distributed import HashStore

from moevement_ext.launch.statements import tell_files, tell_memory, told_files, told_memory


def test_the_directory_of_memory_may_have_any_bytes() -> None:
    store = HashStore()
    assert told_memory(store) is None
    directory = Path(os.fsdecode(b'/dev/shm/m\xfcller'))
    tell_memory(store, directory)
    assert told_memory(store) == directory


def test_files_of_a_rank_that_reports_again_are_not_those_of_another() -> None:
    """A worker is replaced before the others have reported: the launcher would wait for them."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    for files in (b'first', b'again'):
        tell_files(store, 0, files)
        assert told_files(store, world_size=2) is None
    tell_files(store, 1, b'other')
    assert told_files(store, world_size=2) == [b'again', b'other']
