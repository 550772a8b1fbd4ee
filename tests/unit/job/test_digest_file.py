# SPDX-License-Identifier: Apache-2.0
"""A digest file that cannot be written is refused before training, not afterwards."""

from pathlib import Path

import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.job.digest_file import refuse_unwritable


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    earlier, new = tmp_path / 'earlier.json', tmp_path / 'runs' / 'new.json'
    earlier.write_text('{}')
    refuse_unwritable(str(earlier))
    refuse_unwritable(str(new))
    assert earlier.read_text() == '{}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['earlier.json', 'runs']
    assert list(new.parent.iterdir()) == []


@pytest.mark.parametrize('place', ['.', 'file/digest.json', '../' + 300 * 'long'])
def test_a_file_that_cannot_be_written_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    with pytest.raises(ConfigurationError, match='--sparse-ckpt-digest .*: digests cannot be writ'):
        refuse_unwritable(str(tmp_path / place))
