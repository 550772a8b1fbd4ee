# SPDX-License-Identifier: Apache-2.0
"""What the fork server does once, so that no worker has to."""

import argparse
import gc

import pretrain_gpt  # noqa: F401


def _describe_flags_once() -> None:
    """Upstream takes the help of its flags from their sources, which it parses at each start."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    read, known = ArgumentGroupFactory._get_field_docstrings, {}

    def docstrings(self: ArgumentGroupFactory, described: type) -> dict[str, str]:
        if described not in known:
            known[described] = read(self, described)
        return dict(known[described])

    ArgumentGroupFactory._get_field_docstrings = docstrings
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


_describe_flags_once()
# Or every worker's collector walks through all that was imported, and copies its pages.
gc.collect()
gc.freeze()
