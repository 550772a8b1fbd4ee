# SPDX-License-Identifier: Apache-2.0
import json
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).parents[2] / 'stand_ins' / 'driver'
SOUND = {'clock': 1980, 'action': 0, 'no_row_left': 0}


class Devices:
    """Devices of a node, with a fake driver that reads files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, device: str, **changes: object) -> None:
        """Set the values that a device reports; None: not reported."""
        told = {key: value for key, value in {**SOUND, **changes}.items() if value is not None}
        new = self._folder / f'{device}.new'
        new.write_text(json.dumps(told))
        new.rename(self._folder / f'{device}.json')


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Devices:
    folder = tmp_path / 'devices'
    folder.mkdir()
    monkeypatch.setenv('MOEVEMENT_TEST_DEVICES', str(folder))
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.syspath_prepend(str(DRIVER))
    monkeypatch.delitem(sys.modules, 'pynvml', raising=False)
    yield Devices(folder)
    sys.modules.pop('pynvml', None)
