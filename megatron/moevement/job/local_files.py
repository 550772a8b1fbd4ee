# SPDX-License-Identifier: Apache-2.0
"""Checks that a rank's node has the files that the rank reads; an error names a missing file.

A replacement worker may start on a node without the mounts or local copies of the lost node.
Upstream would fail somewhere in its set-up, with a message that does not name the cause.
"""

import os
from collections.abc import Iterator

import megatron.core.datasets.blended_megatron_dataset_config as blends

from megatron.moevement.facts import Settings
from megatron.moevement.job.named_files import sequences_of
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
    """Check, before anything else, that this node has the files that every rank reads.

    A relative path may be a name on a model hub, and is left to upstream.

    Raises:
        ConfigurationError: a file is missing; the message names flag, path, rank and node.
    """
    for name in _READ_BY_ALL:
        path = settings.get(name)
        if isinstance(path, str) and os.path.isabs(path) and not os.path.exists(path):
            raise _missing(rank, name, path)


def missing_data(settings: Settings, rank: int) -> ConfigurationError | None:
    """The error for the first dataset file that this node lacks; None if all exist."""
    for name in _DATA:
        for prefix in _prefixes(settings.get(name)):
            for path in (prefix + part for part in _PARTS):
                if not os.path.exists(path):
                    return _missing(rank, name, path)
    return None


def empty_part(settings: Settings) -> ConfigurationError | None:
    """The error for a part of --split without documents, of which upstream's builder never ends."""
    split = settings.get('split')
    if not isinstance(split, str) or settings.get('sft'):  # SFT data has another format
        return None
    parts = blends.convert_split_vector_to_split_matrix(blends.parse_and_normalize_split(split))
    for prefix in _prefixes(settings.get('data_path')):
        count = sequences_of(prefix)
        if count and any(round(a * count) == round(b * count) for a, b in filter(None, parts)):
            return ConfigurationError(
                f'--split {split}: a part of it gets none of the {count} sequences of {prefix}; '
                'give that part 0 or a larger share, or add documents.'
            )
    return None


def _prefixes(blend: object) -> Iterator[str]:
    """Dataset prefixes in a blend, with or without weights, except those in an object store."""
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
        f'--{name.replace("_", "-")}: {path} does not exist for rank {rank} on {node_name()}; '
        'correct the path, or mount or copy the file to that node.'
    )
