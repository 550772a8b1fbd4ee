# SPDX-License-Identifier: Apache-2.0
"""Command line flags, and the settings that they give."""

import argparse
import dataclasses
import functools
import re
from typing import NoReturn

from megatron.moevement.facts import UpstreamArguments
from moevement_ext.config import (
    AUTO,
    GLOBAL,
    GPU,
    LOCALIZED,
    OFF,
    ON,
    ORDERS,
    REPORT,
    STOP,
    WHOLE_JOB,
    SparseCheckpointConfig,
    network_rate,
)
from moevement_ext.errors import EXIT_USER_ERROR
from moevement_ext.process.user_errors import usage_error

_DEFAULTS = SparseCheckpointConfig()


def _window(text: str) -> int | str:
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} must be a whole number or "{AUTO}"') from None


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `sparse checkpointing` group; pass as upstream's `extra_args_provider`."""
    group = parser.add_argument_group(title='sparse checkpointing')
    group.add_argument(
        '--sparse-ckpt',
        action='store_true',
        help='Capture a slice of the training state into host memory every iteration and recover '
        'from it after a failure.',
    )
    group.add_argument(
        '--sparse-ckpt-window',
        type=_window,
        default=_DEFAULTS.window,
        help='Iterations per window, or "auto": the fewest that the links carry, and the '
        'cores spare where they train, as measured.',
    )
    group.add_argument(
        '--sparse-ckpt-max-window',
        type=int,
        default=_DEFAULTS.max_window,
        help='Longest window that "auto" may choose. Host memory is reserved for it, or for '
        'the longest that fits.',
    )
    group.add_argument(
        '--sparse-ckpt-cpu-share',
        type=float,
        default=_DEFAULTS.cpu_share,
        metavar='SHARE',
        help='Share of the cores of a node that "auto" leaves to the threads that copy, check, '
        'send and receive windows, where the cores train as well (without a GPU); 0: no limit.',
    )
    group.add_argument(
        '--sparse-ckpt-replicas',
        type=int,
        default=_DEFAULTS.replicas,
        help='Copies of the windows of each rank on other failure domains (fewer where there are '
        'fewer domains). A peer there with the same shard of another optimizer instance is one.',
    )
    group.add_argument(
        '--sparse-ckpt-verify-replicas',
        type=int,
        default=_DEFAULTS.verify_replicas,
        metavar='N',
        help='A holder compares every N-th window that it receives of a rank with its checksums '
        'before it counts as replicated. What is read for a recovery is compared in any case; with '
        'more than 1 a replica that is damaged may count until then, and an older window, or none, '
        'be left where no other copy is.',
    )
    group.add_argument(
        '--sparse-ckpt-network-gb-per-s',
        type=network_rate,
        default=_DEFAULTS.network_gb_per_s,
        metavar='RATE',
        help='GB a second at which each rank sends windows to their holders, at most. "auto": '
        'slots are spread over their window; "off" or 0: as fast as the link goes. A recovery is '
        'never held up.',
    )
    group.add_argument(
        '--sparse-ckpt-dir',
        default=_DEFAULTS.dir,
        help='Directory for windows on every node, in a tmpfs.',
    )
    group.add_argument(
        '--sparse-ckpt-disk',
        default=None,
        metavar='DIR',
        help='Copy windows to this directory, on a disk of each node or a shared file system, for '
        'when the memory of all nodes is lost. It takes a third window file in host memory.',
    )
    group.add_argument(
        '--sparse-ckpt-disk-every',
        type=int,
        default=_DEFAULTS.disk_every,
        metavar='N',
        help='Iterations at least between two windows on disk.',
    )
    group.add_argument(
        '--sparse-ckpt-disk-gb-per-s',
        type=float,
        default=_DEFAULTS.disk_gb_per_s,
        help='GB a second at which each rank writes windows to the disk, and reads them back, at '
        'most.',
    )
    group.add_argument(
        '--sparse-ckpt-run-id',
        default=None,
        help='Names the run. A job launched again with the same id recovers from its windows. '
        "Default: Slurm's job id, else a digest of the training flags.",
    )
    group.add_argument(
        '--sparse-ckpt-host-memory-gb',
        type=float,
        default=None,
        help='Host memory per node, in GiB, for windows and replicas. Default: what the tmpfs '
        'and the container leave.',
    )
    group.add_argument(
        '--sparse-ckpt-interface',
        default=None,
        metavar='NAME',
        help='Network interface over which windows and logs travel. Default: that of '
        'GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, else the one that faces the master.',
    )
    group.add_argument(
        '--sparse-ckpt-topology',
        default=None,
        help='JSON file that maps node names to failure domains, as "rack", or with what is above '
        'it, near first: ["rack", "pod"]. Default: each node is its own.',
    )
    group.add_argument(
        '--sparse-ckpt-log-lag',
        type=float,
        default=_DEFAULTS.log_lag,
        help='Iterations that persisting a window takes from the copy of its last slot on, for '
        'which the log has room; tools.plan computes it.',
    )
    group.add_argument(
        '--sparse-ckpt-max-wait',
        type=float,
        default=_DEFAULTS.max_wait,
        help='Seconds that training waits at most for a window to be persisted; then the next one '
        'is skipped.',
    )
    group.add_argument(
        '--sparse-ckpt-order',
        choices=ORDERS,
        default=_DEFAULTS.order,
        help='Which experts a window captures last, which a replay then keeps frozen longest. '
        'popularity: those with the most tokens; soft: with the most weight from their router; '
        'decayed: with the most tokens, averaged over windows; capacity: that use most of '
        '--moe-expert-capacity-factor; fixed: as they come in the model.',
    )
    group.add_argument(
        '--sparse-ckpt-freeze',
        choices=(ON, OFF),
        default=_DEFAULTS.freeze,
        help='on: a replay leaves out the weight gradients of frozen operators; off: it computes '
        'and drops them, to measure what that spares.',
    )
    group.add_argument(
        '--sparse-ckpt-reorder-fraction',
        type=float,
        default=_DEFAULTS.reorder_fraction,
        help='Re-plan the window when this fraction of the experts changed popularity.',
    )
    group.add_argument(
        '--sparse-ckpt-reorder-change',
        type=float,
        default=_DEFAULTS.reorder_change,
        help='Relative change of the share of tokens that counts as a changed popularity.',
    )
    group.add_argument(
        '--sparse-ckpt-store',
        default=None,
        metavar='HOST:PORT',
        help='Where python -m moevement_ext.store serves: the ranks meet there, so that the death '
        'of no node ends the job. Default: the store of the launcher.',
    )
    group.add_argument(
        '--sparse-ckpt-recovery',
        choices=(LOCALIZED, GLOBAL, WHOLE_JOB),
        default=_DEFAULTS.recovery,
        help='localized: only the pipeline stages that lost a worker go back, the others keep '
        'their state (needs torchrun with static rendezvous, or scripts/local_cluster.py); '
        'global: all stages go back together, in the processes that live, and what stages send is '
        'not logged (needs the same); whole-job: all workers are started again.',
    )
    group.add_argument(
        '--sparse-ckpt-hang-timeout',
        type=float,
        default=_DEFAULTS.hang_timeout,
        help='Seconds without a sign of life after which a worker counts as hung.',
    )
    group.add_argument(
        '--sparse-ckpt-verify',
        choices=(OFF, REPORT, STOP),
        default=_DEFAULTS.verify,
        help='Compare a recovered state, bit for bit, with what was captured before the failure '
        'and is newer than the window it came from. report: say in the log and the events what '
        'differs; stop: do not go on from a state that differs, take the next tier. Without '
        'deterministic kernels a replay may differ.',
    )
    group.add_argument(
        '--sparse-ckpt-stuck-timeout',
        type=float,
        default=_DEFAULTS.stuck_timeout,
        help='Seconds for which the training thread of a worker may stand still, waiting for no '
        'other worker (a data loader, a file system), before it is replaced; 0: for ever.',
    )
    group.add_argument(
        '--sparse-ckpt-bind',
        choices=(GPU, OFF),
        default=_DEFAULTS.bind,
        help='gpu: each worker runs on the CPUs near its GPU, as far as its launcher allows, and '
        'has its windows there; off: wherever its launcher has it run.',
    )
    group.add_argument(
        '--sparse-ckpt-forget',
        action='store_true',
        help='Go on from the dense checkpoint, or the start, where only some ranks still have '
        'windows that all had; without it the job does not start, and says which ranks have none.',
    )
    group.add_argument(
        '--sparse-ckpt-strict',
        action='store_true',
        help='Stop when windows or replicas cannot be set up, instead of training unprotected; or '
        'when windows are found of other flags, files, versions or another environment.',
    )
    group.add_argument(
        '--sparse-ckpt-events',
        default=None,
        metavar='DIR',
        help='Write events as JSON lines, one file per rank.',
    )
    group.add_argument(
        '--sparse-ckpt-metrics',
        type=int,
        default=None,
        metavar='PORT',
        help='Show metrics of all ranks of a host to Prometheus at this port. (Metrics go over '
        'OTLP where OTEL_EXPORTER_OTLP_ENDPOINT is set.)',
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
        help="Keep masters in fp8 in the place of fp16, which Transformer Engine's Adam refuses by "
        'itself; small updates are lost. Works without --sparse-ckpt too.',
    )
    _mend_help(parser)
    parser.error = functools.partial(_error, parser)  # type: ignore[method-assign]
    return parser


def _error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Print the error without the usage text, which would be hundreds of lines from each rank."""
    parser.exit(EXIT_USER_ERROR, usage_error(parser, message))


def _mend_help(parser: argparse.ArgumentParser) -> None:
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
