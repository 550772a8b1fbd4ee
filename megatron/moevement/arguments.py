# SPDX-License-Identifier: Apache-2.0
"""Command line flags, and the settings that they give."""

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NoReturn

from megatron.moevement.facts import UpstreamArguments
from moevement_ext.config import (
    AUTO,
    DYNAMIC,
    EXPERT_CHOICES,
    GLOBAL,
    GPU,
    INTERVAL_RULES,
    LOCALIZED,
    OFF,
    ON,
    ORDERS,
    REPORT,
    RESTART,
    STOP,
    STRATEGIES,
    WHOLE_JOB,
    SparseCheckpointConfig,
    network_rate,
)
from moevement_ext.errors import EXIT_USER_ERROR
from moevement_ext.system.user_errors import usage_error


def _number_or(*words: str) -> Callable[[str], int | str]:
    """Parser of a whole number, or of one of these words."""
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


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `sparse checkpointing` group; pass as upstream's `extra_args_provider`."""
    group = parser.add_argument_group(title='sparse checkpointing')
    group.add_argument(
        '--sparse-ckpt',
        action='store_true',
        help='Capture a slice of the training state into host memory every iteration and recover '
        'from it after a failure.',
    )

    def add(flag: str, help_text: str, **options: Any) -> None:
        """Add the flag of a setting, with its default and, if that tells, its type."""
        name = flag.removeprefix('--sparse-ckpt-').replace('-', '_')
        default = getattr(SparseCheckpointConfig, name)
        if isinstance(default, bool):
            options['action'] = 'store_true'
        elif isinstance(default, int | float):
            options.setdefault('type', type(default))
        group.add_argument(flag, default=default, help=help_text, **options)

    add(
        '--sparse-ckpt-strategy',
        'moevement: a slice of the state in every iteration, into host memory, with replicas; '
        'gemini: all of the state every --sparse-ckpt-interval iterations, with replicas; '
        'checkfreq: the same without replicas, then to --sparse-ckpt-disk, which alone it '
        'recovers from; moc: as gemini, but with --sparse-ckpt-experts experts of each layer, the '
        'others as of an earlier checkpoint, so that a recovery loses updates of experts; moetion: '
        'the same in every iteration, with as many experts as it hides. Flags without use for the '
        'strategy are refused.',
        choices=STRATEGIES,
    )
    add(
        '--sparse-ckpt-interval',
        'gemini, checkfreq, moc: iterations from one checkpoint to the next. "auto": 1; '
        'checkfreq: the fewest, as measured, within --sparse-ckpt-overhead-bound and the rate of '
        'the disk. "young", "daly", "oracle": gemini, the best for --sparse-ckpt-mtbf by that '
        'formula, or by trying all.',
        type=_number_or(AUTO, *INTERVAL_RULES),
        metavar='N',
    )
    add(
        '--sparse-ckpt-mtbf',
        'Mean seconds between failures of the job, for the rules of --sparse-ckpt-interval.',
        type=float,
        metavar='SECONDS',
    )
    add(
        '--sparse-ckpt-overhead-bound',
        'checkfreq: largest share of training time that checkpoints may cost.',
        metavar='SHARE',
    )
    add(
        '--sparse-ckpt-experts',
        'moc: experts of each MoE layer in a checkpoint, or "dynamic": 1, doubled whenever '
        'recoveries have lost --sparse-ckpt-lost-share of the tokens at the present number.',
        type=_number_or(DYNAMIC),
        metavar='K',
    )
    add(
        '--sparse-ckpt-expert-choice',
        'moc: which experts. sequential: in turn; load: those with most tokens since their '
        'copy, by their shares of the tokens.',
        choices=EXPERT_CHOICES,
    )
    add(
        '--sparse-ckpt-lost-share',
        'moc, with "dynamic" experts: share of all tokens of the training.',
        metavar='SHARE',
    )
    add(
        '--sparse-ckpt-window',
        'Iterations per window, or "auto": the fewest that the measured links can carry and, '
        'if cores also train, that the spare cores can handle.',
        type=_number_or(AUTO),
    )
    add(
        '--sparse-ckpt-max-window',
        'Longest window that "auto" may choose. Host memory is planned for this length, or '
        'for the longest window that fits.',
    )
    add(
        '--sparse-ckpt-cpu-share',
        'Share of the cores of a node that "auto" grants to helper threads, most of which '
        'copy, check, send and receive windows, if the cores also train (without a GPU); 0: no '
        'limit.',
        metavar='SHARE',
    )
    add(
        '--sparse-ckpt-replicas',
        'Copies of the windows of each rank on other failure domains (fewer where there are '
        'fewer domains). A peer there with the same shard of another optimizer instance counts as '
        'a copy.',
    )
    add(
        '--sparse-ckpt-verify-replicas',
        'A holder verifies the checksums of every N-th window of a rank before the window '
        'counts as replicated. A recovery verifies all windows that it reads; with N above 1 a '
        'damaged replica may go unnoticed until then; without another copy, recovery falls back '
        'to an older window, or has none.',
        metavar='N',
    )
    add(
        '--sparse-ckpt-network-gb-per-s',
        'Limit, in GB/s, of the rate at which each rank sends windows to their holders. '
        '"auto": slots are spread over their window; "off" or 0: no limit. A recovery is never '
        'limited.',
        type=network_rate,
        metavar='RATE',
    )
    add(
        '--sparse-ckpt-dir',
        'Directory for windows on every node, in a tmpfs.',
    )
    add(
        '--sparse-ckpt-disk',
        'Copy windows to this directory, on a disk of each node or a shared file system, in '
        'case all nodes lose their memory. Needs a third window file in host memory.',
        metavar='DIR',
    )
    add(
        '--sparse-ckpt-disk-every',
        'Minimum number of iterations between two windows on disk.',
        metavar='N',
    )
    add(
        '--sparse-ckpt-disk-gb-per-s',
        'Per-rank disk bandwidth limit in GB/s, for writes and reads of windows.',
    )
    add(
        '--sparse-ckpt-run-id',
        'Names the run. A job launched again with the same id recovers from its windows. '
        'Default: slurm-<job id>, else a digest of the training flags.',
    )
    add(
        '--sparse-ckpt-host-memory-gb',
        'Host memory per node, in GiB, for windows and replicas. Default: what the tmpfs '
        'and the memory limit of the container leave.',
        type=float,
    )
    add(
        '--sparse-ckpt-interface',
        'Network interface over which windows and logs travel. Default: that of '
        'GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, else the one that faces the master.',
        metavar='NAME',
    )
    add(
        '--sparse-ckpt-topology',
        'JSON file that maps node names to failure domains: "rack", or a list with the levels '
        'above, innermost first: ["rack", "pod"]. Default: each node is its own domain.',
    )
    add(
        '--sparse-ckpt-log-lag',
        'Iterations from the copy of the last slot of a window until the window is '
        'persisted, which the log has space for; tools.plan computes the number.',
    )
    add(
        '--sparse-ckpt-max-wait',
        'Longest time, in seconds, that training waits until a window is persisted; then the '
        'next window is skipped.',
    )
    add(
        '--sparse-ckpt-order',
        'Which experts a window captures last, and a replay keeps frozen longest. popularity: '
        'experts with the most tokens; soft: with the most weight from their router; decayed: '
        'with the most tokens, averaged over windows; capacity: with the largest share of '
        '--moe-expert-capacity-factor in use; fixed: in the order of the model.',
        choices=ORDERS,
    )
    add(
        '--sparse-ckpt-freeze',
        'on: a replay does not compute the weight gradients of frozen operators; off: a '
        'replay computes and drops them, to measure the saving.',
        choices=(ON, OFF),
    )
    add(
        '--sparse-ckpt-reorder-fraction',
        'Re-plan the window when this fraction of the experts changed popularity.',
    )
    add(
        '--sparse-ckpt-reorder-change',
        'Relative change of the share of tokens that counts as a changed popularity.',
    )
    add(
        '--sparse-ckpt-store',
        'Address of python -m moevement_ext.store, for the rendezvous of the ranks: no node '
        'is then indispensable for the job. Default: the store of the launcher.',
        metavar='HOST:PORT',
    )
    add(
        '--sparse-ckpt-recovery',
        'auto: localized, or global with another --sparse-ckpt-strategy than moevement; '
        'localized: only the pipeline stages that lost a worker roll back, the others keep '
        'their state (needs torchrun with static rendezvous, the launcher for Slurm, or '
        'scripts/local_cluster.py); '
        'global: all stages roll back together, in the surviving processes, without logs of '
        'sends between stages (needs the same); whole-job: all workers restart.',
        choices=(AUTO, LOCALIZED, GLOBAL, WHOLE_JOB),
    )
    add(
        '--sparse-ckpt-hang-timeout',
        'Seconds without a heartbeat after which a worker counts as hung.',
    )
    add(
        '--sparse-ckpt-verify',
        'Compare a recovered state, bit for bit, with captures from before the failure that '
        'are newer than the window it came from. report: list differences in the log and the '
        'events; stop: do not continue from a state that differs, use the next tier. Without '
        'deterministic kernels a replay may differ.',
        choices=(OFF, REPORT, STOP),
    )
    add(
        '--sparse-ckpt-stuck-timeout',
        'Seconds for which the training thread of a worker may block without waiting for '
        'another worker (in a data loader, a file system) before the worker is replaced; 0: no '
        'limit.',
    )
    add(
        '--sparse-ckpt-bind',
        'gpu: each worker runs on the CPUs near its GPU that its launcher allows, and has its '
        'windows in their memory; off: on any CPU that its launcher allows.',
        choices=(GPU, OFF),
    )
    add(
        '--sparse-ckpt-elastic',
        'restart: a job restarted with another number of ranks, or another pipeline, expert '
        'or data parallel layout, continues from the windows of the previous start. Set it from '
        'the first start.',
        choices=(OFF, RESTART),
    )
    add(
        '--sparse-ckpt-elastic-layouts',
        'Layouts for other numbers of ranks, as "pp=2,ep=4;ep=4". Of the layouts of the '
        'flags and of this list that fit, a start takes the one with most ranks; of several, the '
        'first. Surplus ranks do not train. Omitted sizes are 1, but tensor parallelism stays '
        'unchanged, also for experts unless etp is given.',
        metavar='LAYOUTS',
    )
    add(
        '--sparse-ckpt-elastic-exact',
        'Wait for the ranks of the old layout, or refuse to start, rather than continue a '
        'window of several iterations in another layout, which is equal up to rounding only; '
        'windows of one iteration are continued exactly.',
    )
    add(
        '--sparse-ckpt-forget',
        'Continue from the dense checkpoint, or the start, if some ranks have lost windows '
        'that all ranks had, or windows of another layout or release cannot be used; without this '
        'flag the job refuses to start and names these ranks, or the reason.',
    )
    add(
        '--sparse-ckpt-strict',
        'Stop if windows or replicas cannot be set up, instead of training unprotected; or if '
        'there are windows of other flags, files, versions or another environment.',
    )
    add(
        '--sparse-ckpt-events',
        'Write events as JSON lines, one file per rank.',
        metavar='DIR',
    )
    add(
        '--sparse-ckpt-metrics',
        'Serve metrics of all ranks of a host to Prometheus at this port. (With '
        'OTEL_EXPORTER_OTLP_ENDPOINT set, metrics are sent over OTLP.)',
        type=int,
        metavar='PORT',
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
        help="Keep masters in fp8 instead of fp16, which Transformer Engine's Adam alone refuses; "
        'small updates are lost. Works without --sparse-ckpt too.',
    )
    _repair_help(parser)
    parser.error = functools.partial(_error, parser)  # type: ignore[method-assign]
    return parser


def _error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Print the error without the usage text, which would be hundreds of lines from each rank."""
    parser.exit(EXIT_USER_ERROR, usage_error(parser, message))


def _repair_help(parser: argparse.ArgumentParser) -> None:
    """Escape upstream's bare percent signs (megatron-core 0.19.2), on which `--help` fails."""
    for action in parser._actions:
        action.help = action.help and re.sub(r'(?<!%)%(?![%(])', '%%', action.help)


def config_from_args(args: UpstreamArguments) -> SparseCheckpointConfig:
    """The settings of sparse checkpointing on the command line.

    Raises:
        ConfigurationError: a value breaks a rule.
    """
    names = [field.name for field in dataclasses.fields(SparseCheckpointConfig)]
    return SparseCheckpointConfig(**{name: getattr(args, f'sparse_ckpt_{name}') for name in names})
