# SPDX-License-Identifier: Apache-2.0
"""Settings from files: a site's defaults, those of a job, and flags, which win in this order.

    # /etc/moevement.toml; export MOEVEMENT_CONFIG=/etc/moevement.toml
    disk = "/lustre/windows"
    topology = "/etc/racks.json"
    interface = "ib0"

Keys are the fields of `SparseCheckpointConfig`, also those that have no flag.
"""

import os
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NamedTuple, get_type_hints

import msgspec

from moevement_ext.config import ConfigurationError, SparseCheckpointConfig, flag_of

SITE = 'MOEVEMENT_CONFIG'
"""Environment variable: the file of a site."""
CONFIG_FLAG = '--sparse-ckpt-config'
"""Flag: the file of a job."""


class Setting(NamedTuple):
    """A value, and where it was set, in words."""

    value: Any
    source: str


def from_files(flags: Sequence[str]) -> dict[str, Setting]:
    """Settings of both files, by field; of a program with these flags.

    Raises:
        ConfigurationError: names the file and the key that is wrong.
    """
    given = (os.environ.get(SITE), SITE), (last_value(flags, CONFIG_FLAG), CONFIG_FLAG)
    found: dict[str, Setting] = {}
    for path, through in given:
        if path:
            values = _read(path, through)
            found |= {name: Setting(values[name], f'{path} ({through})') for name in values}
    return found


def sources(flags: Sequence[str]) -> dict[str, str]:
    """Where each setting that is no default was set, by field."""
    found = {name: setting.source for name, setting in from_files(flags).items()}
    names = (field.name for field in fields(SparseCheckpointConfig))
    return found | {
        name: 'a flag' for name in names if last_value(flags, flag_of(name)) is not None
    }


def value_of(flags: Sequence[str], flag: str) -> str | None:
    """The value of a flag of sparse checkpointing, from the flags or the files; None: not set.

    Raises `ConfigurationError` as `from_files`.
    """
    found = last_value(flags, flag)
    if found is None:
        settings = (one for name, one in from_files(flags).items() if flag_of(name) == flag)
        found = next((str(setting.value) for setting in settings), None)
    return found


def last_value(flags: Sequence[str], name: str) -> str | None:
    """The last value of a flag, which is the one that counts; None if it is not given."""
    found = None
    for number, flag in enumerate(flags):
        if flag == name:
            found = ''.join(flags[number + 1 : number + 2])
        elif flag.startswith(f'{name}='):
            found = flag.partition('=')[2]
    return found


def _read(path: str, through: str) -> dict[str, Any]:
    try:
        with open(path, 'rb') as file:
            table = tomllib.load(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise ConfigurationError(f'{through} {path}: {reason}; give a TOML file.') from error
    kinds = get_type_hints(SparseCheckpointConfig)
    for key, value in table.items():
        if key not in kinds:
            near = ''.join(f'; did you mean {one}?' for one in get_close_matches(key, kinds, 1))
            raise ConfigurationError(f'{through} {path}: {key} is no setting{near}')
        try:
            table[key] = msgspec.convert(value, kinds[key])
        except msgspec.ValidationError as error:
            raise ConfigurationError(f'{through} {path}: {key} = {value!r}: {error}.') from None
    return table
