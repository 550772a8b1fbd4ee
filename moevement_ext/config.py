# SPDX-License-Identifier: Apache-2.0
"""Settings of sparse checkpointing, filled by the command line flags of the same names."""

import argparse
import math
import os
import re
import socket
from dataclasses import asdict, dataclass, fields
from typing import Any

from moevement_ext.errors import UserError

AUTO = 'auto'
LOCALIZED = 'localized'
GLOBAL = 'global'
WHOLE_JOB = 'whole-job'
ON = 'on'
OFF = 'off'
REPORT = 'report'
STOP = 'stop'
GPU = 'gpu'
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
SEQUENTIAL = 'sequential'
LOAD = 'load'
EXPERT_CHOICES = (SEQUENTIAL, LOAD)
YOUNG = 'young'
DALY = 'daly'
ORACLE = 'oracle'
INTERVAL_RULES = (YOUNG, DALY, ORACLE)
_OF_WINDOWS = 'window max_window cpu_share order freeze reorder_fraction reorder_change log_lag'
_OF_REPLICAS = 'replicas verify_replicas network_gb_per_s topology'
_OF_EXPERTS = 'experts expert_choice lost_share'
_OF_LAYOUTS = 'elastic elastic_layouts elastic_exact'
# Fields without effect, by strategy.
_WITHOUT_USE = {
    MOEVEMENT: ['interval', 'mtbf', 'overhead_bound', *_OF_EXPERTS.split()],
    GEMINI: [*_OF_WINDOWS.split(), 'overhead_bound', *_OF_EXPERTS.split()],
    CHECKFREQ: [
        *_OF_WINDOWS.split(), *_OF_REPLICAS.split(), 'disk_every', 'mtbf', *_OF_EXPERTS.split()
    ],
    MOC: [*_OF_WINDOWS.split(), *_OF_LAYOUTS.split(), 'overhead_bound', 'mtbf'],
    MOETION: [
        *_OF_WINDOWS.split(), *_OF_LAYOUTS.split(), 'overhead_bound', 'mtbf', 'interval',
        *_OF_EXPERTS.split(),
    ],
}  # fmt: skip
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


class ConfigurationError(UserError):
    """A setting breaks a rule; the message names the flag and what to do."""


# Ends the directory of a run in one layout: `<run id>.<digest>`.
LAYOUT_SUFFIX = re.compile(r'\.[0-9a-f]{8}$')

# Fields that may differ between nodes.
_OF_A_NODE = (
    'dir disk_gb_per_s network_gb_per_s cpu_share run_id host_memory_gb interface topology '
    'max_wait store stuck_timeout bind strict events metrics'
).split()


@dataclass(frozen=True)
class SparseCheckpointConfig:
    """One field per `--sparse-ckpt-*` flag."""

    strategy: str = MOEVEMENT
    """'moevement': a slice of the state in every iteration; 'gemini': the whole state every
    `interval` iterations, in memory; 'checkfreq': the same, on disk; 'moc': as 'gemini', but only
    some experts of each layer, so that a recovery loses updates of the others; 'moetion': as 'moc',
    in every iteration, with as many experts as training hides, those with most updates to lose."""
    interval: int | str = AUTO
    """Iterations between checkpoints. 'auto': 1 for gemini and moc, for checkfreq the fewest within
    `overhead_bound`. 'young', 'daly', 'oracle' (gemini only): the optimum for `mtbf`."""
    mtbf: float | None = None
    """Mean seconds between failures of the job, for the intervals 'young', 'daly' and 'oracle'."""
    overhead_bound: float = 0.03
    """Maximum share of training time spent on checkpoints, with 'checkfreq'."""
    experts: int | str = 1
    """Experts of each layer in a checkpoint of 'moc'; 'dynamic': starts with 1 and doubles when
    `lost_share` is reached."""
    expert_choice: str = SEQUENTIAL
    """Choice of the experts in a checkpoint: 'sequential': in turn; 'load': those with most tokens
    since their last copy, by their token shares."""
    lost_share: float = 0.0375
    """Share of all training tokens lost in recoveries at which 'dynamic' doubles its experts."""
    window: int | str = AUTO
    """Iterations per window, or 'auto': the fewest that links and spare cores can sustain."""
    max_window: int = 8
    """The longest window that 'auto' may choose. Host memory is planned for a window of this
    length, or for the longest that fits."""
    cpu_share: float = 0.02
    """Share of a node's cores that the 'auto' window grants to the threads that copy, check, send
    and receive windows, if training runs on the CPU; 0: no limit. With GPUs there is no limit."""
    replicas: int = 2
    """Copies of each rank's windows on other failure domains."""
    network_gb_per_s: float | str = AUTO
    """Rate limit in GB/s (10^9 bytes) of a rank's sends to the holders of its windows; 'auto':
    spread the slots over their window, by measured times; 'off' or 0: no limit."""
    dir: str = f'/dev/shm/moevement-{os.geteuid()}'
    """Directory in a tmpfs, owned by this user."""
    disk: str | None = None
    """Directory on a file system for copies of persisted windows; None: no copies."""
    disk_every: int = 100
    """Minimum iterations between the starts of two windows on disk."""
    disk_gb_per_s: float = 1.0
    """Per-rank limit in GB/s (10^9 bytes) of disk writes and of reads back."""
    run_id: str | None = None
    """Name of the run; a job relaunched with the same id finds its windows."""
    host_memory_gb: float | None = None
    """GiB of host memory per node for windows and replicas; None: all that the tmpfs and the
    container's limit leave."""
    interface: str | None = None
    """Network interface for access to other ranks' host memory; None: automatic choice."""
    topology: str | None = None
    """JSON file {node name: failure domain}."""
    log_lag: float = 1.0
    """Spare capacity of the log, in iterations, for the time from the start of the copy of a
    window's last slot until the window is persisted."""
    max_wait: float = 1.0
    """Maximum seconds that training waits for a window's persistence before it skips the next."""
    verify_replicas: int = 1
    """A holder verifies the checksums of every n-th window received from a rank before the window
    counts as replicated. Every reader of a window verifies it in any case."""
    order: str = POPULARITY
    """Experts captured last, hence frozen longest in a replay: 'popularity': those with most
    tokens; 'soft': with most router weight; 'decayed': with most recent tokens; 'capacity': the
    fullest; 'fixed': no reordering, the order of the model."""
    freeze: str = ON
    """'on': a replay skips weight gradients of operators that are not restored yet; 'off': a replay
    computes and drops them."""
    reorder_fraction: float = 0.25
    """Minimum fraction of experts with changed popularity for a new plan."""
    reorder_change: float = 0.10
    """Relative change of an expert's token share that counts as changed popularity."""
    store: str | None = None
    """HOST:PORT of a store outside the training nodes; None: the launcher's store."""
    recovery: str = AUTO
    """'localized': only the stages that lost a worker roll back; 'global': all stages roll back,
    surviving processes stay, no upstream log; 'whole-job': all workers restart; 'auto':
    'localized', or 'global' if the strategy keeps no log."""
    hang_timeout: float = 60.0
    """Seconds without a heartbeat after which a worker counts as hung."""
    verify: str = REPORT
    """Compare a recovered state with captures newer than its window: 'off', 'report', or 'stop'."""
    stuck_timeout: float = 600.0
    """Seconds without progress, not counting waits for other ranks, after which a worker ends and
    is replaced; 0: never."""
    bind: str = GPU
    """'gpu': bind each worker to the CPUs near its GPU; 'off': keep the launcher's binding."""
    elastic: str = OFF
    """'restart': a job with another parallel layout resumes from the windows of the previous
    layout."""
    elastic_layouts: str | None = None
    """Alternative layouts if the number of ranks does not fit the flags; the first that fits is
    used."""
    elastic_exact: bool = False
    """Wait for the ranks of the old layout, or refuse to start, rather than continue its windows
    equal up to rounding only."""
    forget: bool = False
    """Start from scratch although some ranks still have windows that were once complete."""
    strict: bool = False
    """Stop if memory cannot be set up or the windows belong to another launch, instead of training
    with less protection or from an earlier state."""
    events: str | None = None
    """Directory for events as JSON lines."""
    metrics: int | None = None
    """TCP port on each host that serves the metrics of all its ranks to Prometheus."""

    def __post_init__(self) -> None:
        self._settle()
        if isinstance(self.window, str):
            self._require(self.window == AUTO, 'window', 'a whole number or "auto"')
        else:
            _check_window('--sparse-ckpt-window', self.window)
        _check_window('--sparse-ckpt-max-window', self.max_window)
        self._require(0 <= self.cpu_share <= 1, 'cpu_share', 'in [0, 1]; 0: no limit')
        _at_least('--sparse-ckpt-replicas', self.replicas, 0)
        _at_least('--sparse-ckpt-verify-replicas', self.verify_replicas, 1)
        lag_is_right = 0 <= self.log_lag < math.inf
        self._require(lag_is_right, 'log_lag', 'a number of iterations, 0 or more')
        _at_least('--sparse-ckpt-max-wait', self.max_wait, 0)
        _at_least('--sparse-ckpt-reorder-change', self.reorder_change, 0)
        _at_least('--sparse-ckpt-hang-timeout', self.hang_timeout, 2)
        self._require(
            self.stuck_timeout == 0 or self.stuck_timeout >= self.hang_timeout,
            'stuck_timeout',
            f'0 (never) or at least --sparse-ckpt-hang-timeout ({self.hang_timeout:g})',
        )
        _one_of('--sparse-ckpt-recovery', self.recovery, LOCALIZED, GLOBAL, WHOLE_JOB)
        _one_of('--sparse-ckpt-order', self.order, *ORDERS)
        _one_of('--sparse-ckpt-freeze', self.freeze, ON, OFF)
        _one_of('--sparse-ckpt-bind', self.bind, GPU, OFF)
        self._check_elastic()
        _one_of('--sparse-ckpt-verify', self.verify, OFF, REPORT, STOP)
        memory_is_right = self.host_memory_gb is None or self.host_memory_gb > 0
        self._require(memory_is_right, 'host_memory_gb', 'above 0')
        port_is_right = self.metrics is None or 0 < self.metrics < 65536
        self._require(port_is_right, 'metrics', 'a TCP port, 1 to 65535')
        self._require(0 < self.reorder_fraction <= 1, 'reorder_fraction', 'in (0, 1]')
        self._require(os.path.isabs(self.dir), 'dir', 'an absolute path, in a tmpfs')
        self._check_disk()
        self._check_network()
        if self.store is not None:
            _ = self.store_address

    def _require(self, right: bool, name: str, rule: str) -> None:
        """Refuse the value of the field `name` unless it is right; `rule` says what it must be."""
        if not right:
            value = getattr(self, name)
            shown = f'{value:g}' if isinstance(value, float) else repr(value)
            raise ConfigurationError(f'{_flag(name)} {shown} must be {rule}.')

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
                    f'{_flag(name)} {value} has no use with {flag}: leave it out.'
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
        else:
            _at_least('--sparse-ckpt-interval', self.interval, 1)
        if (self.interval in INTERVAL_RULES) != (self.mtbf is not None):
            raise ConfigurationError(
                '--sparse-ckpt-mtbf must be given with --sparse-ckpt-interval '
                f'{", ".join(INTERVAL_RULES)}, and only with them.'
            )
        mtbf_is_right = self.mtbf is None or 0 < self.mtbf < math.inf
        self._require(mtbf_is_right, 'mtbf', 'a number of seconds above 0')
        self._require(0 < self.overhead_bound <= 1, 'overhead_bound', 'in (0, 1]')
        if self.strategy == CHECKFREQ and self.disk is None:
            raise ConfigurationError(
                f'--sparse-ckpt-disk must be given with {flag}, which recovers from disk only.'
            )

    def _check_experts(self, flag: str) -> None:
        if isinstance(self.experts, str):
            _one_of('--sparse-ckpt-experts', self.experts, 'a whole number', DYNAMIC)
        else:
            _at_least('--sparse-ckpt-experts', self.experts, 1)
        _one_of('--sparse-ckpt-expert-choice', self.expert_choice, *EXPERT_CHOICES)
        self._require(0 < self.lost_share < 1, 'lost_share', 'above 0 and below 1')
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
        _one_of('--sparse-ckpt-elastic', self.elastic, OFF, RESTART)
        for flag, given in (('layouts', self.elastic_layouts), ('exact', self.elastic_exact)):
            if given and self.elastic == OFF:
                raise ConfigurationError(
                    f'--sparse-ckpt-elastic-{flag} needs --sparse-ckpt-elastic {RESTART}.'
                )

    def _check_disk(self) -> None:
        self._require(self.disk is None or os.path.isabs(self.disk), 'disk', 'an absolute path')
        _at_least('--sparse-ckpt-disk-every', self.disk_every, 1)
        self._require(self.disk_gb_per_s > 0, 'disk_gb_per_s', 'above 0')

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
                f'--sparse-ckpt-store {self.store!r} must be HOST:PORT, where python -m '
                'moevement_ext.store serves.'
            )
        return host, int(port)

    def of_all_ranks(self) -> dict[str, str]:
        """Return the values that must be equal on all ranks, by flag."""
        own = {name: value for name, value in asdict(self).items() if name not in _OF_A_NODE}
        own['disk'] = 'none' if self.disk is None else 'given'
        return {_flag(name): str(value) for name, value in own.items()}

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


def _flag(name: str) -> str:
    return f'--sparse-ckpt-{name.replace("_", "-")}'


def _check_window(flag: str, window: int) -> None:
    _at_least(flag, window, 1)
    if window > LONGEST_WINDOW:
        raise ConfigurationError(f'{flag} {window} must be at most {LONGEST_WINDOW}.')


def _one_of(flag: str, value: str, *choices: str) -> None:
    if value not in choices:
        *others, last = choices
        raise ConfigurationError(f'{flag} {value!r} must be {", ".join(others)} or {last}.')


def _at_least(flag: str, value: float, least: float) -> None:
    if not value >= least:  # nan is refused too
        raise ConfigurationError(f'{flag} {value:g} must be at least {least:g}.')


def slurm_run_id() -> str | None:
    """Run id of a job of Slurm without `--sparse-ckpt-run-id`; None outside of Slurm."""
    job = os.environ.get('SLURM_JOB_ID')
    return None if job is None else f'slurm-{job}'
