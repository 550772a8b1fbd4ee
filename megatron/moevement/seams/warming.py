# SPDX-License-Identifier: Apache-2.0
"""Shortens the start of a process that joins a running job.

- Upstream extracts the help of its flags from the source files of its dataclasses, which it parses
  each time that it builds its parser: some 0.2 s.
- It builds the parser twice, the second time to look up `--enable-ft-package`.
- It imports some modules in its set-up.
"""

import argparse
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from megatron.training import get_args
from megatron.training.arguments import add_megatron_arguments

from megatron.moevement.seams import patches

_IMPORTED_LATE = 'megatron.core.models.mimo', 'megatron.core.tokenizers.text.models'

_known: dict[type, dict[str, str]] = {}
_installed = False


def install() -> None:
    """Wrap upstream's functions. Idempotent."""
    global _installed
    if not _installed:
        _installed = True
        factory = 'megatron.training.argument_utils:ArgumentGroupFactory'
        patches.wrap(f'{factory}._get_field_docstrings', _docstrings)
        patches.wrap('megatron.training.ft_integration:setup', _set_up_if_asked)


def warm_up() -> None:
    """Do work that depends on no rank, in a process that waits to become or to fork workers."""
    install()
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for name in _IMPORTED_LATE:
        with suppress(ImportError):  # e.g. of an optional package: the job may not need it
            importlib.import_module(name)


def _docstrings(
    original: Callable[..., dict[str, str]], factory: Any, described: type
) -> dict[str, str]:
    if described not in _known:
        _known[described] = original(factory, described)
    return dict(_known[described])


def _set_up_if_asked(original: Callable[[], None]) -> None:
    """Skip upstream's set-up without the flag: it would only build its parser again and return."""
    if get_args().enable_ft_package:
        original()
