# SPDX-License-Identifier: Apache-2.0
"""Files that a rank reads on its node, named in one line where they are not there.

A replacement may come to a node that has less than the one before: not the mounts, nor the copies
in local folders. Upstream fails there somewhere in its set-up, in words of its own.
"""

import os
from collections.abc import Iterator

from megatron.moevement.facts import Settings
from moevement_ext.config import ConfigurationError, node_name

_READ_BY_ALL = (
    'tokenizer_model',
    'vocab_file',
    'merge_file',
    'data_args_path',
    'per_split_data_args_path',
    'heterogeneous_layers_config_path',
)
_DATA = ('data_path', 'train_data_path', 'valid_data_path', 'test_data_path')
_PARTS = ('.idx', '.bin')


def refuse_missing(settings: Settings, rank: int) -> None:
    """Before anything else: what every rank reads is on this node.

    A name that may be one of a model hub is left to upstream.

    Raises:
        ConfigurationError: with flag, path, rank and node.
    """
    for name in _READ_BY_ALL:
        path = settings.get(name)
        if isinstance(path, str) and os.path.isabs(path) and not os.path.exists(path):
            raise _missing(rank, name, path)


def missing_data(settings: Settings, rank: int) -> ConfigurationError | None:
    """What to say of the first dataset that is not on this node, where one could not be opened."""
    for name in _DATA:
        for prefix in _prefixes(settings.get(name)):
            for path in (prefix + part for part in _PARTS):
                if not os.path.exists(path):
                    return _missing(rank, name, path)
    return None


def _prefixes(blend: object) -> Iterator[str]:
    """Those in a list of datasets, with or without weights; not in an object store."""
    for entry in blend if isinstance(blend, (list, tuple)) else ():
        text = str(entry)
        if not _is_number(text) and '://' not in text:
            yield text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _missing(rank: int, name: str, path: str) -> ConfigurationError:
    return ConfigurationError(
        f'--{name.replace("_", "-")}: {path} is not there for rank {rank} on {node_name()}; '
        f'mount or copy it to that node, as it is on those of the other ranks.'
    )
