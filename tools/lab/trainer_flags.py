# SPDX-License-Identifier: Apache-2.0
"""Reads flags of `pretrain_gpt.py` without starting it."""

import argparse
import warnings
from collections.abc import Iterator, Sequence

from moevement_ext.system import leaving


def prepare_megatron() -> None:
    """Prepare the import of Megatron in a tool; exits with a line if a package is missing."""
    from megatron.moevement.seams import cpu_device, starting  # torch: too slow for --help

    with leaving.in_one_line():
        starting.check_installation()
    if cpu_device.needed():
        cpu_device.install()


def trainer_parser() -> argparse.ArgumentParser:
    """Parser of all flags of Megatron and sparse checkpointing. Imports Megatron, which is slow."""
    prepare_megatron()
    with warnings.catch_warnings(action='ignore'):  # about packages that only training needs
        from megatron.training.arguments import add_megatron_arguments

        from megatron.moevement.arguments import add_arguments
        from megatron.moevement.seams import warming

        warming.install()  # a job that a tool starts may build the parser again

    parser = argparse.ArgumentParser('pretrain_gpt.py', allow_abbrev=False)
    return add_arguments(add_megatron_arguments(parser))


def groups(flags: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the values that follow it; values before the first one belong to ''."""
    name, values = '', list[str]()
    for word in flags:
        if word.startswith('--'):
            if name or values:
                yield name, values
            name, equals, value = word.partition('=')
            values = [value] if equals else []
        else:
            values.append(word)
    if name or values:
        yield name, values
