# SPDX-License-Identifier: Apache-2.0
"""Chooses one of several layouts, and its number of ranks, by the started ranks and memory.

`--sparse-ckpt-elastic-layouts` is evaluated before upstream parses the command line: the flags of
the chosen layout are appended, and the last value of a flag counts.
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
_ETP = 'etp'
_ETP_FLAG = '--expert-tensor-parallel-size'
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
        sizes = {name: getattr(self, name) for name in _FLAGS}
        if self.expert_tensor is not None:
            sizes[_ETP] = self.expert_tensor
        return ','.join(f'{name}={size}' for name, size in sizes.items())

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
            ('data-parallel ranks', data * self.cp, self.instances),
            ('data-parallel ranks of experts', ranks // experts, self.instances),
            ('samples of a batch', whole, self.micro_batch * max(data, 1)),
        ):
            if number % by:
                return f'{number} {what} are not divisible by {by}'
        return None


def fitted(
    arguments: Sequence[str], started: int, too_little: Callable[[Sequence[str], int], str | None]
) -> tuple[int, list[str]]:
    """Find the fitting layout with the most ranks; at a tie, the layout of the flags comes first.

    Returns the number of ranks that train (the first of those that the launcher has started), and
    flags to append to the command line. `too_little` gets a command line with the flags of a layout
    that fits the number of ranks, and that number; it returns why there is too little memory
    (`layout_memory`).

    Raises:
        ConfigurationError: no layout fits; the message has the reason for each.
    """
    own, fallbacks = _of(arguments)
    if not fallbacks:
        return started, []
    layouts: list[tuple[LayoutSizes, list[str]]] = [(own, [])]
    for text in filter(None, fallbacks.split(';')):
        layout = _changed(own, text)
        layouts.append((layout, _flags(layout)))
    reasons: dict[str, str] = {}
    for ranks in range(started, 0, -1):
        for layout, flags in layouts:
            misfit = layout.misfit(ranks) or too_little([*arguments, *flags], ranks)
            if misfit is None:
                return ranks, flags
            reasons.setdefault(str(layout), misfit)
    raise ConfigurationError(
        f'{FLAG}: no layout fits {started} ranks, or fewer: '
        f'{"; ".join(f"{layout}: {misfit}" for layout, misfit in reasons.items())}. '
        'List one that does, or start another number of ranks.'
    )


def _changed(own: LayoutSizes, text: str) -> LayoutSizes:
    """Parse a layout, e.g. `pp=2,ep=4`; omitted sizes are 1, an omitted ETP is that of `own`."""
    found, known = dict.fromkeys(_FLAGS, 1), [*_FLAGS, _ETP]
    for item in text.split(','):
        name, _, size = item.strip().partition('=')
        if name not in known or not size.isdecimal() or int(size) < 1:
            raise ConfigurationError(
                f'{FLAG} {text!r}: give sizes of {", ".join(known)}, e.g. "pp=2,ep=4;ep=4".'
            )
        found['expert_tensor' if name == _ETP else name] = int(size)
    return replace(own, **found)


def _flags(layout: LayoutSizes) -> list[str]:
    given = [item for name, flag in _FLAGS.items() for item in (flag, str(getattr(layout, name)))]
    if layout.expert_tensor is not None:
        given += [_ETP_FLAG, str(layout.expert_tensor)]
    return given


def _of(arguments: Sequence[str]) -> tuple[LayoutSizes, str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(FLAG, default='', dest='fallbacks')
    for name, flag in (
        ('tensor', '--tensor-model-parallel-size'),
        ('expert_tensor', _ETP_FLAG),
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
