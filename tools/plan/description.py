# SPDX-License-Identifier: Apache-2.0
"""Reads descriptions of models, layouts and clusters from JSON or YAML files."""

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from moevement_ext.plan.byte_planner import OperatorTable

from .layout import Batch, Layout, Precision
from .model import ModelShape


class DescriptionError(ValueError):
    """A file is unusable; the message names the file, the field and the rule."""


_Bytes = Annotated[int, msgspec.Meta(le=2**50)]  # sums of them stay within 64 bits


class ListedOperator(msgspec.Struct, forbid_unknown_fields=True):
    """One operator of a list in a file, on one rank."""

    name: str
    full_bytes: _Bytes
    weight_bytes: _Bytes


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model and its training; a file has one section for each field."""

    model: ModelShape
    layout: Layout
    batch: Batch = Batch()
    precision: Precision = Precision()


def read_operators(path: Path) -> OperatorTable:
    """Operators of a JSON list of `{"name", "full_bytes", "weight_bytes"}`, in its order.

    Raises:
        DescriptionError: the list is invalid; the message names entry and field.
    """
    listed = read(path, list[ListedOperator])
    full, weights = (
        np.array(sizes, dtype=np.int64).reshape(-1, 1)
        for sizes in ([one.full_bytes for one in listed], [one.weight_bytes for one in listed])
    )
    try:
        return OperatorTable([one.name for one in listed], full, weights)
    except ValueError as error:
        raise DescriptionError(f'{path}: {error}') from None


def read[Description](path: Path, kind: type[Description]) -> Description:
    """The description in a file; `.yaml` and `.yml` are YAML, anything else is JSON.

    Raises:
        DescriptionError: the file cannot be read, or a field is missing, unknown or wrong.
    """
    decode = msgspec.yaml.decode if path.suffix in ('.yaml', '.yml') else msgspec.json.decode
    try:
        return decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise DescriptionError(f'{path}: {error.strerror}; give an existing file') from None
    except ImportError:
        raise DescriptionError(f'{path}: YAML needs PyYAML: install it, or give JSON') from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DescriptionError(f'{path}: {error}') from None
    except RecursionError:
        raise DescriptionError(f'{path}: it is nested too deeply; this is no description') from None
