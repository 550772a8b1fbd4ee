# SPDX-License-Identifier: Apache-2.0
"""Explains a broken installation before anything imports it."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from moevement_ext.errors import UserError

SUPPORTED_SERIES = '0.19.'


def check_installation() -> None:
    """Check Python, the `megatron` namespace and megatron-core's version.

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
