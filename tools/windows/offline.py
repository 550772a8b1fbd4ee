# SPDX-License-Identifier: Apache-2.0
"""Makes a dense checkpoint from windows in this process, without the ranks that captured them."""

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron.moevement.seams import cpu_device, preflight
from moevement_ext.errors import UserError
from moevement_ext.memory.window.placed import Placed
from moevement_ext.memory.window.refused import RefusedWindow
from tools.windows.choosing import Newest
from tools.windows.copies import Copies
from tools.windows.export import ExportError, saved_in


def export_offline(window: Newest, output: Path, flags: Sequence[str]) -> int:
    """Save the window in `output`; returns the iteration of the checkpoint. Once in a process.

    Raises:
        ExportError: flags or windows do not allow it; the message names what.
    """
    if saved_in(output) is not None:
        raise ExportError(f'--output {output}: there is a checkpoint already; name another one')
    try:
        _use_a_cpu()
        from megatron.moevement.offline.exporter import export
        from megatron.moevement.offline.filling import DenseSlot

        copies = Copies(window.files)
        placed = {owner: header.placed for owner, header in copies.headers.items()}
        known = {owner: one for owner, one in placed.items() if isinstance(one, Placed)}
        logging.disable(logging.WARNING)  # of what this process does not do
        with warnings.catch_warnings(action='ignore'):
            return export(DenseSlot(copies.headers, known, copies.read), flags, output)
    except (RefusedWindow, UserError) as error:
        raise ExportError(str(error)) from error
    finally:
        logging.disable(logging.NOTSET)


def _use_a_cpu() -> None:
    """Prepare the first import of Megatron; GPUs are left alone."""
    os.environ['CUDA_VISIBLE_DEVICES'] = ''
    preflight.check_installation()
    cpu_device.install()
    with warnings.catch_warnings(action='ignore'):
        from megatron.moevement.offline import exporter  # noqa: F401
        from megatron.moevement.seams import dataset_helpers

    dataset_helpers.use_compiled()
    cpu_device.patch_upstream()
