# SPDX-License-Identifier: Apache-2.0
"""Sequences of readings as NVIDIA's documents describe them, and what is decided."""

import msgspec
import pytest

from moevement_ext.devices.judging import SLOW_S, Action, Finding, Judge, Reading
from moevement_ext.devices.xids import Harm, meaning_of

GPU = 'GPU-5f2c'


def sequence(*steps: dict) -> list[list[Finding]]:
    """What is found at each step, of readings five seconds apart; also after a way over JSON."""
    readings = [Reading(GPU, 5.0 * number, **step) for number, step in enumerate(steps)]
    lines = [msgspec.json.encode(reading) for reading in readings]
    judge, again = Judge(), Judge()
    found = [judge.judge(reading) for reading in readings]
    assert found == [again.judge(msgspec.json.decode(line, type=Reading)) for line in lines]
    assert all(finding.device == GPU for findings in found for finding in findings)
    return found


def harms(found: list[list[Finding]]) -> list[Harm | None]:
    """The worst of each step."""
    return [findings[-1].harm if findings else None for findings in found]


SOUND: dict = {
    'action': Action.NONE, 'uncorrectable': 0, 'reset_pending': False, 'no_spare_row': False,
    'link_recoveries': 3, 'clock_mhz': 1980,
}  # fmt: skip


def test_nothing_is_wrong_with_a_sound_device() -> None:
    assert sequence(SOUND, SOUND, {}, SOUND) == [[], [], [], []]


def test_a_device_that_falls_off_the_bus() -> None:
    """Xid 79, the change of the recovery action that goes with it, and a driver at a loss."""
    found = sequence(SOUND, {'xids': (79,)}, {'xids': (154,)}, {'lost': True}, {'lost': True})
    assert harms(found) == [None, Harm.DEVICE, None, Harm.DEVICE, None]
    assert str(found[1][0]) == f'{GPU}: Xid 79: it has fallen off the bus'


def test_an_error_of_memory_that_is_contained() -> None:
    """The process ends, the device goes on; a reset is due some day."""
    struck = {**SOUND, 'uncorrectable': 1, 'reset_pending': True, 'action': Action.DRAIN_AND_RESET}
    found = sequence(SOUND, {'xids': (94,)}, {'xids': (63,)}, {'xids': (45,)}, struck, struck)
    assert harms(found) == [None, Harm.PROCESS, Harm.WORN, Harm.NOTED, Harm.WORN, None]
    assert [finding.what for finding in found[4]] == [
        'faulty rows of its memory wait for a reset',
        'the driver asks for a reset of the GPU once its work is done',
        'uncorrectable memory errors',
    ]


def test_an_error_of_memory_that_is_not() -> None:
    after = {**SOUND, 'uncorrectable': 2, 'action': Action.GPU_RESET}
    assert harms(sequence(SOUND, {'xids': (48, 95)}, after, after)) == [
        None, Harm.DEVICE, Harm.DEVICE, None,
    ]  # fmt: skip


def test_what_was_wrong_before_anybody_looked() -> None:
    """A spare node tells at its first reading; errors that are long past do not count."""
    assert harms(sequence({**SOUND, 'action': Action.NODE_REBOOT})) == [Harm.DEVICE]
    assert harms(sequence({**SOUND, 'reset_pending': True})) == [Harm.WORN]
    assert harms(sequence({**SOUND, 'no_spare_row': True})) == [Harm.WORN]
    assert harms(sequence({**SOUND, 'uncorrectable': 7})) == [None]


def test_only_what_lasts_counts_as_slow() -> None:
    hot = {**SOUND, 'slowed_by': ('heat',)}
    steps = int(SLOW_S / 5)
    assert harms(sequence(*[hot] * steps, SOUND, *[hot] * steps)) == [None] * (2 * steps + 1)
    errors_between = [hot, {'xids': (13,)}] * steps
    assert Harm.WORN in harms(sequence(*errors_between))
    found = sequence(*[hot] * (steps + 4))
    assert harms(found) == [None] * steps + [Harm.WORN] + [None] * 3
    assert found[steps][0].what == 'it is slowed down by heat'


def test_a_link_that_is_trained_again() -> None:
    found = sequence(SOUND, {**SOUND, 'link_recoveries': 4}, {**SOUND, 'link_recoveries': 5})
    assert harms(found) == [None, Harm.WORN, None]


def test_devices_are_told_apart() -> None:
    judge = Judge()
    assert judge.judge(Reading('a', 0.0, lost=True)) != []
    assert judge.judge(Reading('b', 0.0, lost=True)) != []
    assert judge.judge(Reading('a', 1.0, lost=True)) == []


@pytest.mark.parametrize(
    ('xids', 'harm'),
    [
        ((46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158), Harm.DEVICE),
        ((94,), Harm.PROCESS),
        ((63, 92, 144, 150, 155), Harm.WORN),
        ((8, 13, 31, 43, 45, 68, 121, 137, 999), Harm.NOTED),
    ],
)
def test_what_the_catalog_says(xids: tuple[int, ...], harm: Harm) -> None:
    """45 comes with every process that is killed: it must not end its successor."""
    for xid in xids:
        assert meaning_of(xid)[0] is harm, xid
        assert f'Xid {xid}' in meaning_of(xid)[1]
