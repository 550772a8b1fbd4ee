# SPDX-License-Identifier: Apache-2.0
"""Decisions about sequences of readings that NVIDIA's documents describe."""

import pytest

from moevement_ext.system.device_judging import Action, Finding, Harm, Judge, Reading, meaning_of

GPU = 'GPU-5f2c'


def sequence(*steps: dict) -> list[list[Finding]]:
    """Findings at each step."""
    judge = Judge()
    found = [judge.judge(Reading(GPU, **step)) for step in steps]
    assert all(finding.device == GPU for findings in found for finding in findings)
    return found


def harms(found: list[list[Finding]]) -> list[Harm | None]:
    """The worst harm of each step."""
    return [findings[-1].harm if findings else None for findings in found]


SOUND: dict = {'action': Action.NONE, 'clock_mhz': 1980}


def test_sound_device_has_no_findings() -> None:
    assert sequence(SOUND, SOUND, {}, SOUND) == [[], [], [], []]


def test_device_that_falls_off_the_bus_is_reported() -> None:
    """Xid 79, the accompanying change of the recovery action, and a lost device."""
    found = sequence(SOUND, {'xids': (79,)}, {'xids': (154,)}, {'lost': True}, {'lost': True})
    assert harms(found) == [None, Harm.DEVICE, None, Harm.DEVICE, None]
    assert str(found[1][0]) == f'{GPU}: Xid 79: it has fallen off the bus'


def test_contained_memory_error_harms_the_process_only() -> None:
    """The process ends and the device stays usable; a reset is due later."""
    struck = {**SOUND, 'action': Action.DRAIN_AND_RESET}
    found = sequence(SOUND, {'xids': (94,)}, {'xids': (63,)}, {'xids': (45,)}, struck, struck)
    assert harms(found) == [None, Harm.PROCESS, Harm.WORN, Harm.NOTED, Harm.WORN, None]
    assert [finding.what for finding in found[4]] == [
        'the driver asks for a reset of the GPU once its work is done'
    ]


def test_uncontained_memory_error_harms_the_device() -> None:
    after = {**SOUND, 'action': Action.GPU_RESET}
    assert harms(sequence(SOUND, {'xids': (48, 95)}, after, after)) == [
        None, Harm.DEVICE, Harm.DEVICE, None,
    ]  # fmt: skip


def test_fault_before_the_first_reading_is_reported() -> None:
    """A spare node reports it at its first reading."""
    assert harms(sequence({**SOUND, 'action': Action.NODE_REBOOT})) == [Harm.DEVICE]
    assert harms(sequence({**SOUND, 'action': Action.DRAIN_P2P})) == [Harm.WORN]


def test_devices_are_judged_separately() -> None:
    judge = Judge()
    assert judge.judge(Reading('a', lost=True)) != []
    assert judge.judge(Reading('b', lost=True)) != []
    assert judge.judge(Reading('a', lost=True)) == []


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
        assert meaning_of(xid)[0] is harm, xid
        assert f'Xid {xid}' in meaning_of(xid)[1]
