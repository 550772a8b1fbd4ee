# SPDX-License-Identifier: Apache-2.0
"""Files are read into checked descriptions; what is wrong is named with file, field and rule."""

import json
from typing import Any

import msgspec
import pytest

from tools.model.description import PRESETS, DescriptionError, Training, read


@pytest.fixture
def written(tmp_path):
    def write(content, name='file.json'):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.mark.parametrize('name', ['deepseek-v3', 'moe-llava'])
def test_presets_survive_a_file(written, name):
    preset = PRESETS[name]
    assert read(written(msgspec.to_builtins(preset)), Training) == preset


def test_a_file_without_end_is_no_crash(written):
    with pytest.raises(DescriptionError, match='nested too deeply'):
        read(written('[' * 100_000), Any)
