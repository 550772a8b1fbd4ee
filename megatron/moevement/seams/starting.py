# SPDX-License-Identifier: Apache-2.0
"""Preparation of a process before Megatron is imported, for any entry point."""

import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAM_START = time.time()
"""Time in seconds since the epoch, before torch is imported."""

from megatron.moevement.seams import cpu_device, quiet  # noqa: E402
from moevement_ext.errors import UserError  # noqa: E402
from moevement_ext.system import leaving  # noqa: E402

SUPPORTED_SERIES = '0.19.'


def prepare(flags: Sequence[str] | None) -> None:
    """Check the installation; redirect CUDA to the CPU on machines without a GPU.

    `flags` are those of the command line; None: this process does not train.
    """
    with leaving.in_one_line():
        check_installation()
        if flags is not None and cpu_device.needed():
            quiet.refuse_without_gpu(flags)
    if cpu_device.needed():
        cpu_device.install()


def check_installation() -> None:
    """Explain a broken installation before anything imports it.

    Raises:
        UserError: the message names what was found and a remedy.
    """
    # A checkout on PYTHONPATH is not installed by pip, which would have checked Python.
    if sys.version_info < (3, 12):  # noqa: UP036
        raise UserError(f'Python >= 3.12 is needed, this is {sys.version.split()[0]}.')
    _check_namespace()
    _check_version()


def _check_namespace() -> None:
    spec = importlib.util.find_spec('megatron')
    origin = getattr(spec, 'origin', None)
    if origin is not None and Path(origin).name == '__init__.py':
        raise UserError(
            f'{origin} makes `megatron` a regular package and hides the other parts of the '
            'namespace. Remove that file, or the package that owns it.'
        )


def _check_version() -> None:
    try:
        version = importlib.metadata.version('megatron-core')
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            'megatron-core is not installed. Run `pip install "megatron-core>=0.19.2,<0.20"`.'
        ) from error
    if not version.startswith(SUPPORTED_SERIES):
        raise UserError(
            f'megatron-core {version} is installed; this package was checked against '
            f'{SUPPORTED_SERIES}x. Run `pip install "megatron-core>=0.19.2,<0.20"`.'
        )
