# SPDX-License-Identifier: Apache-2.0
"""Reports of workers to their launcher."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from moevement_ext.membership.mailbox import (
    own_process,
    read_files,
    read_memory,
    write_files,
    write_memory,
)


def test_memory_directory_may_have_any_bytes() -> None:
    store = HashStore()
    assert read_memory(store) is None
    directory = Path(os.fsdecode(b'/dev/shm/m\xfcller'))
    write_memory(store, directory)
    assert read_memory(store) == directory


def test_second_file_report_of_a_rank_replaces_the_first() -> None:
    """A worker may be replaced before the other ranks have reported."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=1))
    for files in (b'first', b'again'):
        write_files(store, 0, files)
        assert read_files(store, world_size=2) is None
    write_files(store, 1, b'other')
    assert read_files(store, world_size=2) == [b'again', b'other']


def test_no_two_processes_have_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MOEVEMENT_PROCESS', '')
    monkeypatch.delenv('MOEVEMENT_PROCESS')
    number = own_process()
    assert own_process() == number
    monkeypatch.delenv('MOEVEMENT_PROCESS')  # in another process
    assert own_process() != number
    monkeypatch.setenv('MOEVEMENT_PROCESS', '5')  # a launcher has drawn it
    assert own_process() == 5
