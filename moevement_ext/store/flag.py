# SPDX-License-Identifier: Apache-2.0
"""Finds `--sparse-ckpt-store` in the program's flags, for launchers."""

from collections.abc import Sequence

from moevement_ext.config import SparseCheckpointConfig

FLAG = '--sparse-ckpt-store'


def given(flags: Sequence[str], name: str = FLAG) -> str | None:
    """The last value of a flag, which is the one that counts; None if the flag is not given."""
    found = None
    for number, flag in enumerate(flags):
        if flag == name:
            found = ''.join(flags[number + 1 : number + 2])
        elif flag.startswith(f'{name}='):
            found = flag.partition('=')[2]
    return found


def address(flags: Sequence[str]) -> tuple[str, int] | None:
    """Host and port of that store, None without the flag; raises as `split`."""
    found = given(flags)
    return None if found is None else split(found)


def split(store: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, as `login1:29400` or `[fd00::5]:29400`; `ConfigurationError`."""
    return SparseCheckpointConfig(store=store).store_address
