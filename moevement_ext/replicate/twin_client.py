# SPDX-License-Identifier: Apache-2.0
"""A connection to a twin: a peer that captures the same bytes and receives only stubs."""

from collections.abc import Callable

from moevement_ext.memory.window.agreed import NOTHING_AGREED, Agreed
from moevement_ext.memory.window.file import SlotBlob, WindowFile
from moevement_ext.memory.window.kept import Kept
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.memory.window.twin import OwnParts, owner_header, stub_of, stub_window_bytes
from moevement_ext.replicate.client import ReplicaClient


class TwinClient(ReplicaClient):
    """Client of a twin. One thread at a time uses it. `own_parts` may differ at the twin."""

    takes_all = False

    def __init__(self, address: tuple[str, int], secret: bytes, own_parts: OwnParts) -> None:
        super().__init__(address, secret)
        self._own_parts = own_parts

    def put_slot(
        self,
        owner: int,
        file: WindowFile,
        slot: int,
        agreed: Agreed = NOTHING_AGREED,
        before: Callable[[int], object] = lambda nbytes: None,
    ) -> int:
        """Send the stub of a sealed slot; returns 0, as few bytes do not measure the link."""
        super().put_slot(owner, file, slot, agreed, before)
        return 0

    def fetch_headers(self, owner: int, start: int) -> list[SlotHeader]:
        """Fetch the headers as sealed by the owner."""
        stubs = super().fetch_headers(owner, start)
        return [owner_header(stub, f'peer {self.address[0]}') for stub in stubs]

    def _blob(self, file: WindowFile, slot: int) -> SlotBlob:
        return stub_of(file, slot, self._own_parts)

    def _kept(self, file: WindowFile) -> Kept | None:
        return None

    def _window_bytes(self, file: WindowFile) -> int:
        """Return 0 for the usual size; for a resent window, perhaps from other flags, its size."""
        whole = len(file.slots()) == file.header(file.slots()[0]).window
        return stub_window_bytes(file, self._own_parts) if whole else 0
