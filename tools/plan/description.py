# SPDX-License-Identifier: Apache-2.0
"""Reads descriptions of models, layouts and clusters from JSON or YAML files."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import numpy as np

from moevement_ext.plan.byte_planner import OperatorTable
from tools.plan.layout import Batch, Layout, Precision
from tools.plan.model import ModelShape


class DescriptionError(ValueError):
    """A file is unusable; the message names the file, the field and the rule."""


_Bytes = Annotated[int, msgspec.Meta(le=2**50)]  # sums of them stay within 64 bits


class ListedOperator(msgspec.Struct, forbid_unknown_fields=True):
    """One operator of a list in a file, on one rank."""

    name: str
    full_bytes: _Bytes
    weight_bytes: _Bytes


def read_operators(path: Path) -> OperatorTable:
    """Operators of a JSON list of `{"name", "full_bytes", "weight_bytes"}`, in its order.

    Raises:
        DescriptionError: the list is invalid; the message names entry and field.
    """
    found = read(path)
    try:
        listed = msgspec.convert(found, list[ListedOperator])
        return OperatorTable(
            [item.name for item in listed],
            np.array([[item.full_bytes] for item in listed], dtype=np.int64).reshape(-1, 1),
            np.array([[item.weight_bytes] for item in listed], dtype=np.int64).reshape(-1, 1),
        )
    except ValueError as error:
        raise DescriptionError(f'{path}: {error}') from None


def read_as[Description](path: Path, kind: type[Description]) -> Description:
    """The dataclass `kind` with the fields of the file.

    Raises:
        DescriptionError: a field is missing, unknown or wrong.
    """
    return build(str(path), read(path), kind)


def build[Description](source: str, data: Any, kind: type[Description]) -> Description:
    """The dataclass `kind` with the fields of a decoded file; see `read_as`.

    Raises:
        DescriptionError: a field is missing, unknown or wrong.
    """
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(known)) if isinstance(data, dict) else []
    if unknown:
        raise DescriptionError(
            f'{source}: unknown field {unknown[0]!r} of {kind.__name__}; there are '
            f'{", ".join(known)}'
        )
    try:
        return msgspec.convert(data, kind)
    except ValueError as error:
        raise DescriptionError(f'{source}: {error}') from None


def read(path: Path) -> Any:
    """Decoded content; `.yaml` and `.yml` are YAML, anything else is JSON.

    Raises:
        DescriptionError: the file is missing or cannot be decoded.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DescriptionError(f'{path}: {error.strerror}; give an existing file') from None
    try:
        if path.suffix in ('.yaml', '.yml'):
            return msgspec.yaml.decode(content)
        return msgspec.json.decode(content)
    except ImportError:
        raise DescriptionError(f'{path}: YAML needs PyYAML: install it, or give JSON') from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DescriptionError(f'{path}: {error}') from None
    except RecursionError:
        raise DescriptionError(f'{path}: it is nested too deeply; this is no description') from None


@dataclasses.dataclass(frozen=True)
class Training:
    """A model and its training; a file has one section for each field."""

    model: ModelShape
    layout: Layout
    batch: Batch = dataclasses.field(default_factory=Batch)
    precision: Precision = dataclasses.field(default_factory=Precision)


def read_training(path: Path) -> Training:
    """Read the sections `model`, `layout` and, if present, `batch` and `precision` of a file.

    Raises:
        DescriptionError: a section or field is missing, unknown or wrong.
    """
    kinds, data = get_type_hints(Training), read(path)
    if not isinstance(data, dict) or not {'model', 'layout'} <= set(data) <= set(kinds):
        raise DescriptionError(
            f'{path}: give an object with the sections model and layout and, if need be, batch '
            f'and precision'
        )
    sections: dict[str, Any] = {
        name: build(f'{path}: {name}', section, kinds[name]) for name, section in data.items()
    }
    return Training(**sections)
