# SPDX-License-Identifier: Apache-2.0
"""What a reader expects a window to be, compared before anything of it is loaded."""

from pathlib import Path
from typing import NamedTuple, Self

from moevement_ext.memory.window.name import RankIdentity, WindowName
from moevement_ext.memory.window.refused import ForeignRun, WrongTopology, WrongWindow
from moevement_ext.memory.window.settings import Differences, RunSettings, decode, differences, told
from moevement_ext.memory.window.slot import SlotHeader

IDENTITY = {
    'run': ForeignRun,
    'topology': WrongTopology,
    'owner': WrongWindow,
    'start': WrongWindow,
    'plan': WrongWindow,
}
"""What all slots of a window say alike, and how another one is refused."""

_OF_SETTINGS = ('run', 'topology')


class Expected(NamedTuple):
    """What every slot of a window must say of itself; None: anything will do."""

    run: str | None = None
    """Digest of the run."""
    topology: str | None = None
    """Digest of the parallel layout."""
    owner: int | None = None
    """Rank whose state it is."""
    name: WindowName | None = None
    settings: RunSettings | None = None
    """What the job is launched with."""

    @classmethod
    def of(cls, identity: RankIdentity, name: WindowName | None = None) -> Self:
        """Expect a window that this rank itself has captured."""
        return cls(identity.run, identity.topology, identity.rank, name, identity.settings)

    def check(self, header: SlotHeader, path: Path) -> None:
        """Compare with what a slot says of itself.

        Args:
            header: of one slot.
            path: the file it is in, for the message.

        Raises:
            RefusedWindow: typed by what differs.
        """
        window = (None, None) if self.name is None else (self.name.start, self.name.plan)
        wanted = (self.run, self.topology, self.owner, *window)
        known = self.differs(header).decisive
        for (field, refusal), expected in zip(IDENTITY.items(), wanted, strict=True):
            found = getattr(header, field)
            if expected is not None and found != expected:
                named = known if field in _OF_SETTINGS else []
                raise refusal(
                    f'{path}: ' + (told(named) or f'{field} is {found!r}, expected {expected!r}')
                )
        if known:
            raise ForeignRun(f'{path}: {told(known)}')

    def differs(self, header: SlotHeader) -> Differences:
        """In what the job differs that has captured this slot; in nothing, where it does not say.

        A window of which only this differs may be used, unless that is decisive.
        """
        if self.settings is None or not header.settings:
            return Differences([], [])
        return differences(decode(header.settings), self.settings)
