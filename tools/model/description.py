# SPDX-License-Identifier: Apache-2.0
"""Descriptions of models, layouts and clusters: those of files, and those of `presets.toml`."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from ..lab.fields import Positive, Whole
from .layout import Batch, Layout, Precision
from .shape import ModelShape, layers_with_experts

GIGA = 10**9


class DescriptionError(ValueError):
    """A file is unusable; the message names the file, the field and the rule."""


class Training(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model and its training; a file has one section for each field."""

    model: ModelShape
    layout: Layout
    batch: Batch = Batch()
    precision: Precision = Precision()


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal nodes of equal GPUs. Units are bytes and seconds; rates are achieved, not nominal."""

    name: str
    gpus_per_node: Whole
    gpu_memory_bytes: Positive
    copy_bytes_per_s: Positive
    """Rate from GPU to host memory, per GPU, with all GPUs of a node active."""
    network_bytes_per_s: Positive
    """Rate out of a node, over all links."""
    host_memory_bytes: Positive
    peak_flops: Positive
    """Dense bf16 operations per second of a GPU; to derive iteration times from MFU."""


def known_or_read[Description](
    name: str, kind: type[Description], known: dict[str, Description], flag: str
) -> Description:
    """A preset, or the description in a file. Raises DescriptionError."""
    if name not in known and not Path(name).exists():
        raise DescriptionError(f'{flag} {name}: no such file, nor one of {", ".join(known)}')
    return known.get(name) or read(Path(name), kind)


def read[Description](path: Path, kind: type[Description]) -> Description:
    """The description in a file; `.yaml` and `.yml` are YAML, anything else is JSON.

    Raises DescriptionError: the file cannot be read, or a field is missing, unknown or wrong.
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


class _Known(msgspec.Struct):
    models: dict[str, dict[str, Any]]
    clusters: dict[str, Cluster]
    gpu_hours_per_failure: dict[str, float]


def _preset(model: dict[str, Any], experts: dict[str, Any], **others: object) -> Training:
    if pattern := experts.pop('moe_layer_freq', None):
        experts['moe_layers'] = layers_with_experts(pattern, model['layers'])
    sections = {name: others[name] for name in ('layout', 'batch')}
    return msgspec.convert({'model': model | experts, **sections}, Training)


KNOWN = msgspec.toml.decode(files(__package__).joinpath('presets.toml').read_bytes(), type=_Known)
PRESETS = {name: _preset(**sections) for name, sections in KNOWN.models.items()}
"""Models by name; the first four belong to the paper's evaluation."""
CLUSTERS = KNOWN.clusters
GPU_HOURS_PER_FAILURE = KNOWN.gpu_hours_per_failure
"""GPU-hours between failures of a job."""


def mtbf_s(gpu_hours_per_failure: float, gpus: int) -> float:
    """Mean seconds between failures of a job on `gpus` GPUs with independent failures."""
    return gpu_hours_per_failure * 3600 / gpus
