# SPDX-License-Identifier: Apache-2.0
import pytest

from moevement_ext.system.device_judging import Harm, of_xid


@pytest.mark.parametrize(
    ('xids', 'harm'),
    [
        ((46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158), Harm.DEVICE),
        ((94,), Harm.PROCESS),
        ((63, 92, 144, 150, 155), Harm.WORN),
        ((8, 13, 31, 43, 45, 68, 121, 137, 999), Harm.NOTED),
    ],
)
def test_harms_match_the_xid_catalog(xids: tuple[int, ...], harm: Harm) -> None:
    """Xid 45 follows every killed process and must not end its replacement."""
    for xid in xids:
        assert of_xid('GPU-5f2c', xid).harm is harm, xid
        assert f'Xid {xid}' in of_xid('GPU-5f2c', xid).what


def test_finding_names_the_device() -> None:
    assert str(of_xid('GPU-5f2c', 79)) == 'GPU-5f2c: Xid 79: it has fallen off the bus'
