# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of sparse checkpointing, and the settings parsed from them."""

import argparse
import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megatron.moevement.seams import patches
from moevement_ext.config import (
    AUTO,
    CHOICES,
    DYNAMIC,
    INTERVAL_RULES,
    ConfigurationError,
    SparseCheckpointConfig,
    flag_of,
    flagged,
    network_rate,
)
from moevement_ext.config_file import CONFIG_FLAG, SITE, from_files
from moevement_ext.system.leaving import Parser

if TYPE_CHECKING:
    from megatron.moevement.facts import UpstreamArguments

_OURS = '--sparse-ckpt'


def _number_or(*words: str) -> Callable[[str], int | str]:
    """Return a parser of whole numbers that also accepts `words`."""
    others = f' or "{words[0]}"' if len(words) == 1 else f', or one of {", ".join(words)}'

    def parse(text: str) -> int | str:
        if text in words:
            return text
        try:
            return int(text)
        except ValueError:
            rule = f'must be a whole number{others}'
            raise argparse.ArgumentTypeError(f'{text!r} {rule}') from None

    return parse


# Parser options that follow neither from the default of a setting nor from its choices.
_OPTIONS: dict[str, dict[str, Any]] = {
    'interval': {'type': _number_or(AUTO, *INTERVAL_RULES), 'metavar': 'N'},
    'mtbf': {'type': float, 'metavar': 'SECONDS'},
    'experts': {'type': _number_or(DYNAMIC), 'metavar': 'K'},
    'window': {'type': _number_or(AUTO)},
    'network_gb_per_s': {'type': network_rate, 'metavar': 'RATE'},
    'disk': {'metavar': 'DIR'},
    'disk_every': {'metavar': 'N'},
    'host_memory_gb': {'type': float},
    'store': {'metavar': 'HOST:PORT'},
    'elastic_layouts': {'metavar': 'LAYOUTS'},
    'events': {'metavar': 'DIR'},
    'metrics': {'type': int, 'metavar': 'PORT'},
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `sparse checkpointing` group; pass as upstream's `extra_args_provider`."""
    group = parser.add_argument_group(title='sparse checkpointing')
    group.add_argument(
        '--sparse-ckpt',
        action='store_true',
        help='Capture a slice of the training state into host memory every iteration and recover '
        'from it after a failure.',
    )

    for field in flagged():
        group.add_argument(
            flag_of(field.name),
            default=field.default,
            help=field.metadata['help'].replace('%', '%%'),
            **_options(field.name, field.default),
        )
    group.add_argument(
        '--sparse-ckpt-digest',
        default=None,
        metavar='FILE',
        help='Write SHA-256 digests of the final training state; works without --sparse-ckpt too.',
    )
    group.add_argument(
        '--sparse-ckpt-fp8-masters',
        action='store_true',
        help="Keep masters in fp8 instead of fp16, although Transformer Engine's Adam refuses fp8; "
        'small updates are lost. Works without --sparse-ckpt too.',
    )
    group.add_argument(
        CONFIG_FLAG,
        default=None,
        metavar='FILE',
        help='TOML file of settings, by their names in the API; flags win. It wins over the file '
        f'that {SITE} names, for the defaults of a site.',
    )
    _repair_help(parser)
    read = functools.partial(_parse_with_files, parser, parser.parse_known_args)
    parser.parse_known_args = read  # type: ignore
    # Without the usage text, which would be hundreds of lines from each rank.
    parser.error = functools.partial(Parser.error, parser)  # type: ignore
    return parser


def _parse_with_files(
    parser: argparse.ArgumentParser,
    original: Callable[..., Any],
    args: Sequence[str] | None = None,
    namespace: argparse.Namespace | None = None,
) -> Any:
    """Parse with the settings of files instead of the defaults; plain Megatron reads no file."""
    found = argparse.Namespace() if namespace is None else namespace
    try:
        flags = sys.argv[1:] if args is None else args
        files = from_files(flags) if any(_OURS in flag for flag in flags) else {}
    except ConfigurationError as error:
        parser.error(str(error))
    vars(found).update({f'sparse_ckpt_{name}': one.value for name, one in files.items()})
    return original(args, found)


def _options(name: str, default: object) -> dict[str, Any]:
    """Options of a flag for the parser, except its default and its help."""
    if isinstance(default, bool):
        return {'action': 'store_true'}
    options = dict(_OPTIONS.get(name, {}))
    if isinstance(default, int | float):
        options.setdefault('type', type(default))
    if name in CHOICES:
        options['choices'] = CHOICES[name]
    return options


def _repair_help(parser: argparse.ArgumentParser) -> None:
    """Escape upstream's bare percent signs (megatron-core 0.19.2), on which `--help` fails."""
    for action in parser._actions:
        action.help = action.help and re.sub(r'(?<!%)%(?![%(])', '%%', action.help)


def config_from_args(args: 'UpstreamArguments') -> SparseCheckpointConfig:
    """The settings of sparse checkpointing, from flags and files.

    Raises:
        ConfigurationError: a value breaks a rule.
    """
    given = vars(args)
    keys = {field.name: f'sparse_ckpt_{field.name}' for field in fields(SparseCheckpointConfig)}
    return SparseCheckpointConfig(
        **{name: given[key] for name, key in keys.items() if key in given}
    )


def allow_expert_slots() -> None:
    """Have upstream's parser use `validate`, for the lifetime of the process."""
    patches.wrap('megatron.training.arguments:validate_args', validate)


def validate(original: Callable[..., object], args: Any, *given: object) -> object:
    """Upstream's validation; with slots, experts may be any number that ranks do not divide."""
    try:
        slots = config_from_args(args).expert_slots
    except ConfigurationError:  # said once the flags are valid
        slots = 0
    if not slots or not args.sparse_ckpt or not args.num_experts:
        return original(args, *given)
    experts, args.num_experts = args.num_experts, slots * args.expert_model_parallel_size
    original(args, *given)
    args.num_experts = experts
    return args
