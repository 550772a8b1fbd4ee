# SPDX-License-Identifier: Apache-2.0
"""Settings of sparse checkpointing, filled by the command line flags of the same names."""

import argparse
import functools
import math
import os
import re
import socket
import textwrap
from collections.abc import Callable
from dataclasses import Field, asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from moevement_ext.errors import UserError

AUTO = 'auto'
LOCALIZED = 'localized'
GLOBAL = 'global'
WHOLE_JOB = 'whole-job'
OFF = 'off'
REPORT = 'report'
STOP = 'stop'
RESTART = 'restart'
SLOWEST_NETWORK_GB_PER_S = 0.02
"""Twice the rate below which a peer stops waiting for a transfer."""
POPULARITY = 'popularity'
SOFT = 'soft'
DECAYED = 'decayed'
CAPACITY = 'capacity'
FIXED = 'fixed'
ORDERS = (POPULARITY, SOFT, DECAYED, CAPACITY, FIXED)
MOEVEMENT = 'moevement'
GEMINI = 'gemini'
CHECKFREQ = 'checkfreq'
MOC = 'moc'
MOETION = 'moetion'
STRATEGIES = (MOEVEMENT, GEMINI, CHECKFREQ, MOC, MOETION)
LOSSY = (MOC, MOETION)
"""Strategies that recover without some updates of experts."""
DYNAMIC = 'dynamic'
YOUNG = 'young'
DALY = 'daly'
ORACLE = 'oracle'
INTERVAL_RULES = (YOUNG, DALY, ORACLE)
CHOICES = {
    'strategy': STRATEGIES,
    'order': ORDERS,
    'recovery': (AUTO, LOCALIZED, GLOBAL, WHOLE_JOB),
    'verify': (OFF, REPORT, STOP),
    'elastic': (OFF, RESTART),
    'routes': (AUTO, OFF),
}
"""All values of each field that has a fixed set of them."""
_OF_WINDOWS = 'window order log_lag'
_OF_REPLICAS = 'replicas network_gb_per_s topology'
_OF_LAYOUTS = 'elastic elastic_layouts elastic_exact'
# Fields without effect, by strategy.
_WITHOUT_USE = {
    MOEVEMENT: ['interval', 'mtbf', 'experts'],
    GEMINI: [*_OF_WINDOWS.split(), 'experts'],
    CHECKFREQ: [*_OF_WINDOWS.split(), *_OF_REPLICAS.split(), 'disk_every', 'mtbf', 'experts'],
    MOC: [*_OF_WINDOWS.split(), *_OF_LAYOUTS.split(), 'mtbf'],
    MOETION: [*_OF_WINDOWS.split(), *_OF_LAYOUTS.split(), 'mtbf', 'interval', 'experts'],
}
_DENSE = {'window': 1, 'max_window': 1, 'order': FIXED}
# Values that a strategy assigns to fields left at their defaults.
_SETTLED: dict[str, dict[str, Any]] = {
    MOEVEMENT: {'recovery': LOCALIZED},
    GEMINI: {**_DENSE, 'recovery': GLOBAL},
    CHECKFREQ: {**_DENSE, 'recovery': GLOBAL, 'replicas': 0, 'disk_every': 1},
    MOC: {**_DENSE, 'recovery': GLOBAL},
    MOETION: {**_DENSE, 'recovery': GLOBAL},
}
LONGEST_WINDOW = 10_000
"""Upper limit of a window, in iterations; no window file has this many slots."""


# Fields with numbers, whether a number is right, and the rule in words.
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ('window', lambda length: length >= 1, 'at least 1'),
    ('window', lambda length: length <= LONGEST_WINDOW, f'at most {LONGEST_WINDOW}'),
    ('interval', lambda iterations: iterations >= 1, 'at least 1'),
    ('experts', lambda count: count >= 1, 'at least 1'),
    ('expert_slots', lambda count: count >= 0, 'at least 0'),
    ('expert_replicas', lambda count: count >= 1, 'at least 1'),
    ('expert_rebalance', lambda iterations: iterations >= 0, 'at least 0'),
    ('replicas', lambda count: count >= 0, 'at least 0'),
    ('mtbf', lambda s: 0 < s < math.inf, 'a number of seconds above 0'),
    ('log_lag', lambda lag: 0 <= lag < math.inf, 'a number of iterations, 0 or more'),
    ('hang_timeout', lambda s: s >= 2, 'at least 2'),
    ('host_memory_gb', lambda size: size > 0, 'above 0'),
    ('metrics', lambda port: 0 < port < 65536, 'a TCP port, 1 to 65535'),
    ('disk_every', lambda iterations: iterations >= 1, 'at least 1'),
    ('disk_gb_per_s', lambda rate: rate > 0, 'above 0'),
)


class ConfigurationError(UserError):
    """A setting breaks a rule; the message names the flag and what to do."""


_HELP_WIDTH = 88

# Ends the directory of a run in one layout: `<run id>.<digest>`.
LAYOUT_SUFFIX = re.compile(r'\.[0-9a-f]{8}$')

# Fields that may differ between nodes.
_OF_A_NODE = (
    'dir disk_gb_per_s network_gb_per_s cpu_share run_id host_memory_gb interface topology '
    'max_wait store stuck_timeout strict events metrics'
).split()


def setting[T](default: T) -> Callable[[str], T]:
    """Return a function from a help text to a field that has it as `metadata['help']`."""
    return lambda text: field(default=default, metadata={'help': ' '.join(text.split())})


def documented_by_field[C: type](settings: C) -> C:
    """Decorate a dataclass of settings: `help` shows the fields' texts, a wrong name the nearest.

    An unknown field then raises `ConfigurationError`.
    """
    own: Any = settings
    init, known = own.__init__, [field.name for field in fields(settings)]

    @functools.wraps(init)
    def checked(self: object, *values: Any, **given: Any) -> None:
        for name in given.keys() - known:
            near = get_close_matches(name, known, 1)
            raise ConfigurationError(
                f'{settings.__name__} has no field {name!r}'
                + (f'; did you mean {near[0]}?' if near else ': it has ' + ', '.join(known) + '.')
            )
        init(self, *values, **given)

    own.__init__ = checked
    texts = (
        textwrap.fill(
            f'{field.name}: {field.metadata["help"]}',
            _HELP_WIDTH,
            initial_indent='    ',
            subsequent_indent='        ',
        )
        for field in fields(settings)
        if 'help' in field.metadata
    )
    settings.__doc__ = '\n'.join([f'{settings.__doc__}\nFields:', *texts])
    return settings


GUEST = 'MOEVEMENT_GUEST'
# Of workers: HOST:PORT of the coordinator that their launcher keeps, only :PORT on rank 0's host.
COORDINATOR = 'MOEVEMENT_COORDINATOR'


def flagged() -> list[Field[Any]]:
    """The fields that have a flag."""
    return [field for field in fields(SparseCheckpointConfig) if 'help' in field.metadata]


@documented_by_field
@dataclass(frozen=True)
class SparseCheckpointConfig:
    """One field per `--sparse-ckpt-*` flag, with the help of the flag in its metadata.

    The last fields have no flag, but may be set in a file (`config_file.py`).
    """

    strategy: str = setting(MOEVEMENT)("""'moevement': a slice of the state in every iteration, into
    host memory, with replicas; 'gemini': the whole state every --sparse-ckpt-interval iterations,
    into host memory, with replicas; 'checkfreq': the same without replicas, then to
    --sparse-ckpt-disk, which alone it recovers from; 'moc': as 'gemini', but with
    --sparse-ckpt-experts experts of each layer, the others as of an earlier checkpoint, so that a
    recovery loses updates of experts; 'moetion': the same in every iteration, with as many experts
    as training hides, those with most updates to lose. Flags without use for the strategy are
    refused.""")
    interval: int | str = setting(AUTO)("""'gemini', 'checkfreq', 'moc': iterations from one
    checkpoint to the next. 'auto': 1; with 'checkfreq' the fewest, as measured, with
    which stalls take at most 3 % of the time and the disk keeps up. 'young', 'daly', 'oracle':
    'gemini' only, the best for --sparse-ckpt-mtbf by that formula, or by trying all.""")
    mtbf: float | None = setting(None)("""Mean seconds between failures of the job, for 'young',
    'daly' and 'oracle' of --sparse-ckpt-interval.""")
    experts: int | str = setting(1)("""'moc': experts of each MoE layer in a checkpoint, or
    'dynamic': 1, doubled whenever recoveries have lost 3.75 % of the tokens at the present
    number.""")
    window: int | str = setting(AUTO)("""Iterations per window, or 'auto': the fewest that the
    measured links can carry, at most 8, or as many as host memory has room for; if cores also
    train, 2 instead of 1 where that costs less.""")
    replicas: int = setting(2)("""Copies of the windows of each rank on other failure domains (fewer
    where there are fewer domains). A peer there with the same shard of another optimizer instance
    counts as a copy.""")
    network_gb_per_s: float | str = setting(AUTO)("""Limit, in GB/s (10^9 bytes), of the rate at
    which each rank sends windows to their holders. 'auto': slots are spread over their window, by
    measured times; 'off' or 0: no limit. A recovery is never limited.""")
    dir: str = setting(f'/dev/shm/moevement-{os.geteuid()}')("""Directory for windows on every node,
    in a tmpfs, owned by this user.""")
    disk: str | None = setting(None)("""Directory for copies of persisted windows, on a disk of each
    node or a shared file system, in case all nodes lose their memory. Needs a third window file in
    host memory. Default: no copies.""")
    disk_every: int = setting(100)("""Minimum iterations between the starts of two windows on disk,
    except the final state of an elastic job at a planned end.""")
    disk_gb_per_s: float = setting(1.0)("""Per-rank limit in GB/s (10^9 bytes) of disk writes, and
    of the reads that check them; not of recoveries, and not of the final state of an elastic job at
    a planned end.""")
    run_id: str | None = setting(None)("""Name of the run. A job launched again with the same id
    recovers from its windows. Default: 'slurm-' and SLURM_JOB_ID, else a digest of the training
    flags.""")
    host_memory_gb: float | None = setting(None)("""Maximum host memory per node, in GiB, for
    windows, replicas and logs. With it a job that cannot reserve its memory ends, instead of
    training unprotected. Default: all that the tmpfs, the memory limit of the container and the
    machine leave.""")
    topology: str | None = setting(None)("""JSON file that maps node names to failure domains:
    "rack", or a list with the levels above, innermost first: ["rack", "pod"]. Default: each node is
    its own domain.""")
    log_lag: float = setting(1.0)("""Spare capacity of the log, in iterations, for the time from the
    start of the copy of a window's last slot until the window is persisted.""")
    order: str = setting(POPULARITY)("""Experts that a window captures last, and a replay keeps
    frozen longest. 'popularity': those with most tokens; 'soft': with most weight from their
    router; 'decayed': with most tokens, averaged over windows with halving weights; 'capacity':
    with the largest share of --moe-expert-capacity-factor in use; 'fixed': no reordering, the order
    of the model.""")
    store: str | None = setting(None)("""HOST:PORT of a store outside the training nodes, of
    `moevement store`, for the rendezvous of the ranks: no node is then indispensable for the job.
    Default: the store of the launcher.""")
    recovery: str = setting(AUTO)("""'auto': 'localized', or 'global' if --sparse-ckpt-strategy is
    not 'moevement' and so keeps no log; 'localized': only the pipeline stages that lost a worker
    roll back, the others keep their state (needs torchrun with static rendezvous, the launcher for
    Slurm, or moevement launch); 'global': all stages roll back together, in the surviving
    processes, without logs of sends between stages (needs the same); 'whole-job': all workers
    restart.""")
    hang_timeout: float = setting(60.0)("""Seconds without a heartbeat after which a worker counts
    as hung.""")
    verify: str = setting(REPORT)("""Compare a recovered state, bit for bit, with captures from
    before the failure that are newer than the window it came from. 'report': list differences in
    the log and the events; 'stop': end the job with status 77 if they differ, windows stay, and
    capture nothing until a recovery is judged; 'off': no comparison. Without deterministic kernels
    a replay may differ.""")
    stuck_timeout: float = setting(600.0)("""Seconds for which the training thread of a worker may
    block without waiting for another worker (in a data loader, a file system) before the worker
    ends and is replaced; 0: no limit.""")
    elastic: str = setting(OFF)("""'restart': a job restarted with another number of ranks, or
    another pipeline, expert or data parallel layout, continues from the windows of the previous
    start. Set it from the first start.""")
    elastic_layouts: str | None = setting(None)("""Layouts for other numbers of ranks, as
    'pp=2,ep=4;ep=4'. A start takes the layout of the flags if that fits all its ranks, else the
    first of this list that does; if none does, it is refused, with the nearest number of ranks that
    one fits. Omitted sizes are 1, but tensor parallelism stays unchanged, also for experts unless
    etp is given.""")
    elastic_exact: bool = setting(False)("""Refuse to start rather than continue a window of
    several iterations in another layout, which is equal up to rounding only; windows of one
    iteration are continued exactly.""")
    forget: bool = setting(False)("""Continue from the dense checkpoint, or the start, if some ranks
    have lost windows that all ranks had, or windows cannot be read now, or are of another layout or
    release and cannot be used. Without this flag the job refuses to start, and names the ranks
    without windows, or the reason.""")
    strict: bool = setting(False)("""Stop if windows or replicas cannot be set up, or a system limit
    is too low for a recovery, instead of training with less protection; or if there are windows of
    other flags, files, versions or another environment, instead of training from an earlier state,
    or from these windows with bits that may differ; or if ranks differ in any of these; or if a
    dense checkpoint cannot be written.""")
    events: str | None = setting(None)('Directory for events as JSON lines, one file per rank.')
    metrics: int | None = setting(None)("""TCP port that serves the metrics of the first rank of
    each host to Prometheus; those of the others have the ports after it, in the order of
    LOCAL_RANK. (With OTEL_EXPORTER_OTLP_ENDPOINT set, metrics are sent over OTLP.)""")

    routes: str = AUTO
    """'auto': data-parallel peers compute the micro-batches of ranks that are guests on a node of
    others; 'off': guests compute them."""
    expert_slots: int = 0
    """Slots for experts of each rank in each layer, for replicas of experts; 0: the experts are
    divided evenly over the ranks."""
    expert_replicas: int = 2
    """Ranks that have each expert, at least; fewer if there are too few slots."""
    expert_rebalance: int = 0
    """Iterations after which experts are placed again, by tokens counted meanwhile; 0: never."""
    cpu_share: float = 0.02
    """Share of a node's cores for helper threads, if the cores also train; 0: no limit."""
    max_window: int = 8
    """Longest window that 'auto' may choose."""
    max_wait: float = 1.0
    """Maximum seconds that training waits until a window is persisted; then one is skipped."""
    freezes: bool = True
    """A replay does not compute the weight gradients of operators that are not restored yet."""
    interface: str | None = None
    """Network interface for access to other ranks' host memory; None: that of GLOO_SOCKET_IFNAME or
    NCCL_SOCKET_IFNAME, else the one that faces the master."""
    reorder_fraction: float = 0.25
    """Minimum fraction of experts with changed popularity for a new plan of the window."""
    reorder_change: float = 0.10
    """Relative change of an expert's share of the tokens that counts as changed popularity."""

    def __post_init__(self) -> None:
        self._settle()
        for name, choices in CHOICES.items():
            _one_of(flag_of(name), getattr(self, name), *choices)
        for name, right, rule in _RULES:
            value = getattr(self, name)
            self._require(value is None or isinstance(value, str) or right(value), name, rule)
        if isinstance(self.window, str):
            self._require(self.window == AUTO, 'window', 'a whole number or "auto"')
        self._require(
            self.stuck_timeout == 0 or self.stuck_timeout >= self.hang_timeout,
            'stuck_timeout',
            f'0 (never) or at least --sparse-ckpt-hang-timeout ({self.hang_timeout:g})',
        )
        self._check_elastic()
        self._require(os.path.isabs(self.dir), 'dir', 'an absolute path, in a tmpfs')
        self._require(self.disk is None or os.path.isabs(self.disk), 'disk', 'an absolute path')
        self._check_network()
        if self.store is not None:
            _ = self.store_address

    def _require(self, right: bool, name: str, rule: str) -> None:
        """Refuse the value of the field `name` unless it is right; `rule` says what it must be."""
        if not right:
            value = getattr(self, name)
            shown = f'{value:g}' if isinstance(value, float) else repr(value)
            raise ConfigurationError(f'{flag_of(name)} {shown} must be {rule}.')

    def _settle(self) -> None:
        """Refuse fields that the strategy does not use, and fill in the values that it implies.

        The rest of the program then depends on values, not on strategies.
        """
        _one_of('--sparse-ckpt-strategy', self.strategy, *STRATEGIES)
        settled, flag = _SETTLED[self.strategy], f'--sparse-ckpt-strategy {self.strategy}'
        defaults = {field.name: field.default for field in fields(self)}
        for name in _WITHOUT_USE[self.strategy]:
            value = getattr(self, name)
            if value not in (defaults[name], settled.get(name)):
                raise ConfigurationError(
                    f'{flag_of(name)} {value} has no use with {flag}: leave it out.'
                )
        if self.strategy != MOEVEMENT and self.recovery == LOCALIZED:
            raise ConfigurationError(
                f'--sparse-ckpt-recovery {LOCALIZED} must be {GLOBAL} or {WHOLE_JOB} with {flag}, '
                'which keeps no log for the replay of one stage.'
            )
        for name, value in settled.items():
            if getattr(self, name) == defaults[name]:
                object.__setattr__(self, name, value)
        self._check_interval(flag)
        self._check_experts(flag)

    def _check_interval(self, flag: str) -> None:
        rules = INTERVAL_RULES if self.strategy == GEMINI else ()
        if isinstance(self.interval, str):
            _one_of('--sparse-ckpt-interval', self.interval, 'a whole number', AUTO, *rules)
        if (self.interval in INTERVAL_RULES) != (self.mtbf is not None):
            raise ConfigurationError(
                '--sparse-ckpt-mtbf must be given with --sparse-ckpt-interval '
                f'{", ".join(INTERVAL_RULES)}, and only with them.'
            )
        if self.strategy == CHECKFREQ and self.disk is None:
            raise ConfigurationError(
                f'--sparse-ckpt-disk must be given with {flag}, which recovers from disk only.'
            )

    def _check_experts(self, flag: str) -> None:
        if isinstance(self.experts, str):
            _one_of('--sparse-ckpt-experts', self.experts, 'a whole number', DYNAMIC)
        if self.lossy and self.verify == STOP:
            raise ConfigurationError(
                f'--sparse-ckpt-verify {STOP} must be {REPORT} or {OFF} with {flag}, whose '
                'recoveries lose updates of experts: every one would stop.'
            )

    @property
    def lossy(self) -> bool:
        """True if a recovery may lose updates of experts."""
        return self.strategy in LOSSY

    def _check_elastic(self) -> None:
        if self.run_id is not None and LAYOUT_SUFFIX.search(self.run_id):
            raise ConfigurationError(
                f'--sparse-ckpt-run-id {self.run_id!r} must be without a dot and 8 hexadecimal '
                'digits at its end, by which the directories of layouts are told apart: use "-".'
            )
        for flag, given in (('layouts', self.elastic_layouts), ('exact', self.elastic_exact)):
            if given and self.elastic == OFF:
                raise ConfigurationError(
                    f'--sparse-ckpt-elastic-{flag} needs --sparse-ckpt-elastic {RESTART}.'
                )

    def _check_network(self) -> None:
        rate = self.network_gb_per_s
        if isinstance(rate, str):
            right = rate in (AUTO, OFF)
        else:
            right = rate == 0 or SLOWEST_NETWORK_GB_PER_S <= rate < math.inf
        rule = f'{AUTO}, {OFF}, or a number of at least {SLOWEST_NETWORK_GB_PER_S:g}'
        self._require(right, 'network_gb_per_s', rule)

    @property
    def network_bytes_per_s(self) -> float | None:
        """Fixed rate limit of a rank's replication in bytes/s; None: no fixed limit."""
        rate = self.network_gb_per_s
        return None if isinstance(rate, str) or rate == 0 else 1e9 * rate

    @property
    def store_address(self) -> tuple[str, int]:
        """Host and port of `store`, which must be set.

        Raises:
            ConfigurationError: `store` is not HOST:PORT.
        """
        host, _, port = (self.store or '').rpartition(':')
        if host.startswith('[') and host.endswith(']'):  # as in a URL: [fd00::5]:29400
            host = host[1:-1]
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigurationError(
                f'--sparse-ckpt-store {self.store!r} must be HOST:PORT, where `moevement store` '
                'serves.'
            )
        return host, int(port)

    def of_all_ranks(self) -> dict[str, str]:
        """Return the values that must be equal on all ranks, by flag."""
        own = {name: value for name, value in asdict(self).items() if name not in _OF_A_NODE}
        own['disk'] = 'none' if self.disk is None else 'given'
        flags = {field.name: flag_of(field.name) for field in flagged()}
        return {flags.get(name, name): str(value) for name, value in own.items()}

    @property
    def longest_window(self) -> int:
        """Window length, in iterations, for which host memory is reserved."""
        return self.max_window if isinstance(self.window, str) else self.window


def network_rate(text: str) -> float | str:
    """Parse the value of `--sparse-ckpt-network-gb-per-s`, for `argparse`."""
    try:
        return text if text in (AUTO, OFF) else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f'{text!r} must be a number, "{AUTO}" or "{OFF}"'
        ) from None


def node_name() -> str:
    """Return the name of this node; `MOEVEMENT_NODE` overrides it for emulated nodes."""
    return os.environ.get('MOEVEMENT_NODE') or socket.gethostname()


def is_guest() -> bool:
    """True if a launcher has started this rank on the node of others, as its own node is lost."""
    return GUEST in os.environ


def flag_of(name: str) -> str:
    """The flag of a field; its name, if it has none."""
    has_flag = SparseCheckpointConfig.__dataclass_fields__[name].metadata
    return f'--sparse-ckpt-{name.replace("_", "-")}' if has_flag else name


def _one_of(flag: str, value: str, *choices: str) -> None:
    if value not in choices:
        *others, last = choices
        raise ConfigurationError(f'{flag} {value!r} must be {", ".join(others)} or {last}.')


def slurm_run_id() -> str | None:
    """Run id of a job of Slurm without `--sparse-ckpt-run-id`; None outside of Slurm."""
    job = os.environ.get('SLURM_JOB_ID')
    return None if job is None else f'slurm-{job}'


EXPORT = 'MOEVEMENT_EXPORT'
"""Environment variable of a relaunch by `moevement windows export` that only saves what the run's
windows have; its value is the tier to read."""


def is_export() -> bool:
    """True if this process belongs to an export, which leaves the windows where they are."""
    return EXPORT in os.environ


def reads_memory() -> bool:
    """True if this is an export from host memory."""
    return os.environ.get(EXPORT) == 'memory'
