# SPDX-License-Identifier: Apache-2.0
"""A digest file that cannot be written is refused before training, not afterwards."""

from pathlib import Path

import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.job.digest_file import refuse_unwritable


def test_check_leaves_a_writable_file_unchanged(tmp_path: Path) -> None:
    earlier, new = tmp_path / 'earlier.json', tmp_path / 'runs' / 'new.json'
    earlier.write_text('{}')
    partial = tmp_path / 'earlier.json.partial'  # another job is writing it
    partial.touch()
    refuse_unwritable(str(earlier))
    refuse_unwritable(str(new))
    assert earlier.read_text() == '{}'
    assert sorted(path.name for path in tmp_path.iterdir()) == [earlier.name, partial.name]


@pytest.mark.parametrize('place', ['.', 'file/digest.json', '../' + 300 * 'long'])
def test_unwritable_file_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    with pytest.raises(ConfigurationError, match='--sparse-ckpt-digest .*: digests cannot be writ'):
        refuse_unwritable(str(tmp_path / place))
