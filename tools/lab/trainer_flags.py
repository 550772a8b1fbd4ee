# SPDX-License-Identifier: Apache-2.0
"""What `pretrain_gpt.py` makes of its flags, without starting it."""

import argparse
import warnings
from collections.abc import Sequence

from megatron.moevement.seams import cpu_device


def trainer_parser() -> argparse.ArgumentParser:
    """Takes all flags of Megatron and of sparse checkpointing. Importing Megatron takes seconds."""
    if cpu_device.needed():
        cpu_device.install()
    with warnings.catch_warnings(action='ignore'):  # of what is not installed: nothing trains
        from megatron.training.arguments import add_megatron_arguments

        from megatron.moevement.arguments import add_arguments

    parser = argparse.ArgumentParser('pretrain_gpt.py', allow_abbrev=False)
    return add_arguments(add_megatron_arguments(parser))


def parse_trainer_flags(flags: Sequence[str]) -> argparse.Namespace:
    """The settings, as parsed; exits with a line and status 2 if a flag is wrong."""
    return trainer_parser().parse_args(list(flags))
