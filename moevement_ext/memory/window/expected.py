# SPDX-License-Identifier: Apache-2.0
"""A reader's requirements on a window, checked before any payload is loaded."""

from pathlib import Path
from typing import NamedTuple, Self

from moevement_ext.memory.window.name import RankIdentity, WindowName
from moevement_ext.memory.window.refused import OtherSettings, WrongWindow
from moevement_ext.memory.window.settings import Differences, RunSettings, decode, differences, told
from moevement_ext.memory.window.slot import SlotHeader

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
