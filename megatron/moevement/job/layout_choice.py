# SPDX-License-Identifier: Apache-2.0
"""Choice of a layout at start, by the number of ranks and their memory.

`--sparse-ckpt-elastic-layouts` is evaluated on the command line, before upstream parses it: the
chosen layout is appended as flags, of which the last counts.

Checked against megatron-core 0.19.2.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moevement_ext.config import ConfigurationError

FLAG = '--sparse-ckpt-elastic-layouts'
_FLAGS = {
    'pp': '--pipeline-model-parallel-size',
    'ep': '--expert-model-parallel-size',
    'cp': '--context-parallel-size',
    'instances': '--num-distributed-optimizer-instances',
}


_UNEVEN = (
    '--pipeline-model-parallel-layout',
    '--decoder-first-pipeline-num-layers',
    '--decoder-last-pipeline-num-layers',
    '--account-for-embedding-in-pipeline-split',
    '--account-for-loss-in-pipeline-split',
)


@dataclass(frozen=True)
class LayoutSizes:
    """Sizes that decide whether a layout fits a number of ranks."""

    tensor: int = 1
    expert_tensor: int | None = None
    pp: int = 1
    ep: int = 1
    cp: int = 1
    instances: int = 1
    layers: int = 0
    """0: stages may have different numbers of layers."""
    experts: int | None = None
    micro_batch: int = 1
    global_batch: int | None = None

    def __str__(self) -> str:
        return ','.join(f'{name}={getattr(self, name)}' for name in _FLAGS)

    def misfit(self, ranks: int) -> str | None:
        """Reason why `ranks` ranks cannot have this layout; None if they can."""
        stage = self.tensor * self.cp * self.pp
        experts = (self.expert_tensor or self.tensor) * self.ep * self.pp
        data = ranks // stage
        whole = self.global_batch or self.micro_batch * data
        for what, number, by in (
            ('ranks', ranks, stage),
            ('ranks', ranks, experts),
            ('layers', self.layers, self.pp),
            ('experts', self.experts or self.ep, self.ep),
            ('data-parallel ranks', data, self.instances),
            ('samples of a batch', whole, self.micro_batch * max(data, 1)),
        ):
            if number % by:
                return f'{number} {what} are not divided by {by}'
        return None


def fitted(
    arguments: Sequence[str], ranks: int, too_little: Callable[[Sequence[str]], str | None]
) -> list[str]:
    """Flags to append to a command line, so that its layout fits; none if it fits already.

    Args:
        arguments: the command line.
        ranks: the number that the launcher has started.
        too_little: given a command line with the flags of a layout, returns the memory that is too
            small (see `layout_memory`), or None. Called for layouts that fit the number of ranks.

    Raises:
        ConfigurationError: no layout fits; the message has the reason for each.
    """
    own, fallbacks = _of(arguments)
    if not fallbacks:
        return []
    reasons = []
    for text in ('', *filter(None, fallbacks.split(';'))):
        layout = _changed(own, text) if text else own
        flags = _flags(layout) if text else []
        misfit = layout.misfit(ranks) or too_little([*arguments, *flags])
        if misfit is None:
            return flags
        reasons.append(f'{layout}: {misfit}')
    raise ConfigurationError(
        f'{FLAG}: no layout fits {ranks} ranks, all of which must have a place: '
        f'{"; ".join(reasons)}. List one that does, or start another number of ranks.'
    )


def _changed(own: LayoutSizes, text: str) -> LayoutSizes:
    """Parse a layout, e.g. `pp=2,ep=4`; sizes that are left out are 1."""
    found = dict.fromkeys(_FLAGS, 1)
    for item in text.split(','):
        name, _, size = item.strip().partition('=')
        if name not in _FLAGS or not size.isdecimal() or int(size) < 1:
            raise ConfigurationError(
                f'{FLAG} {text!r}: give sizes of {", ".join(_FLAGS)}, e.g. "pp=2,ep=4;ep=4".'
            )
        found[name] = int(size)
    return replace(own, **found)


def _flags(layout: LayoutSizes) -> list[str]:
    return [item for name, flag in _FLAGS.items() for item in (flag, str(getattr(layout, name)))]


def _of(arguments: Sequence[str]) -> tuple[LayoutSizes, str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(FLAG, default='', dest='fallbacks')
    for name, flag in (
        ('tensor', '--tensor-model-parallel-size'),
        ('expert_tensor', '--expert-tensor-parallel-size'),
        *_FLAGS.items(),
        ('layers', '--num-layers'),
        ('experts', '--num-experts'),
        ('micro_batch', '--micro-batch-size'),
        ('global_batch', '--global-batch-size'),
    ):
        parser.add_argument(flag, type=int, dest=name, default=argparse.SUPPRESS)
    try:
        given, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError:  # upstream's parser reports it better
        return LayoutSizes(), ''
    found = vars(given)
    fallbacks = found.pop('fallbacks')
    if any(argument.partition('=')[0] in _UNEVEN for argument in arguments):
        found.pop('layers', None)
    return LayoutSizes(**found), fallbacks
