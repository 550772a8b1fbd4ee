# SPDX-License-Identifier: Apache-2.0
"""Checks of a window before its payloads are read, from any source of bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from moevement_ext.memory.window.format import Entry, check_layout, unknown_version
from moevement_ext.memory.window.name import RankIdentity, WindowName
from moevement_ext.memory.window.refused import (
    CorruptWindow,
    OtherSettings,
    TruncatedWindow,
    WrongWindow,
)
from moevement_ext.memory.window.settings import Differences, RunSettings, decode, differences, told
from moevement_ext.memory.window.slot import FORMAT_VERSION, Record, SlotHeader, decode_frame

IDENTITY = {
    'run': OtherSettings,
    'topology': OtherSettings,
    'owner': WrongWindow,
    'start': WrongWindow,
    'plan': WrongWindow,
}
"""Header fields that are equal in all slots of a window, with the error for other values."""


class Expected(NamedTuple):
    """Required header fields of every slot; None accepts any value."""

    run: str | None = None
    topology: str | None = None
    owner: int | None = None
    name: WindowName | None = None
    settings: RunSettings | None = None

    @classmethod
    def of(cls, identity: RankIdentity, name: WindowName | None = None) -> Self:
        """Require a window that this rank itself captured."""
        return cls(identity.run, identity.topology, identity.rank, name, identity.settings)

    def check(self, header: SlotHeader, path: Path) -> None:
        """Compare with the header of a slot; raises a `RefusedWindow` typed by the difference."""
        window = (None, None) if self.name is None else (self.name.start, self.name.plan)
        wanted = (self.run, self.topology, self.owner, *window)
        known = self.differs(header).decisive
        for (field, refusal), expected in zip(IDENTITY.items(), wanted, strict=True):
            found = getattr(header, field)
            if expected is not None and found != expected:
                named = known if refusal is OtherSettings else []
                raise refusal(
                    f'{path}: ' + (told(named) or f'{field} is {found!r}, expected {expected!r}')
                )
        if known:
            raise OtherSettings(f'{path}: {told(known)}')

    def differs(self, header: SlotHeader) -> Differences:
        """Differences of this job from the job that captured the slot; empty if unknown.

        A window with only doubtful differences may be used.
        """
        if self.settings is None or not header.settings:
            return Differences([], [])
        return differences(decode(header.settings), self.settings)


def verified_header(
    path: Path, name: WindowName | None, entry: Entry, frame: bytes | memoryview
) -> SlotHeader:
    """Verify and decode the `frame` at `entry` of a file that claims to hold window `name`.

    Raises `RefusedWindow` if it is damaged, of another version, or contradicts the file.
    """
    try:
        header = decode_frame(frame)
        if header.version != FORMAT_VERSION:
            raise unknown_version(path, header.version)
        if header.slot != entry.slot:
            raise ValueError(f'the header is that of slot {header.slot}')
        check_layout(header, name, entry.payload_bytes)
    except ValueError as error:
        raise CorruptWindow(f'{path}: slot {entry.slot}: {error}') from error
    return header


def check_whole(path: Path, headers: Sequence[SlotHeader], expected: Expected) -> None:
    """Check that headers of all slots, ascending, make up a whole window, the expected one.

    Raises a `RefusedWindow` typed by the reason; `path` is for its message.
    """
    if not headers:
        raise TruncatedWindow(f'{path}: holds no slot')
    if len({header.window for header in headers}) > 1:
        raise CorruptWindow(f'{path}: slots disagree on the length of the window')
    window = headers[0].window
    if len(headers) != window or headers[-1].slot != window - 1:
        present = [header.slot for header in headers]
        raise TruncatedWindow(f'{path}: has slots {present} of a window of {window}')
    for field in IDENTITY:
        found = {getattr(header, field) for header in headers}
        if len(found) > 1:
            raise CorruptWindow(f'{path}: slots disagree on {field}: {sorted(found)}')
    expected.check(headers[0], path)


def damaged(path: Path, slot: int, record: Record) -> CorruptWindow:
    return CorruptWindow(
        f'{path}: slot {slot}: checksum mismatch in operator {record.operator}, tensor '
        f'{record.tensor}, part {record.part}, elements [{record.start}, {record.end})'
    )
