# SPDX-License-Identifier: Apache-2.0
"""Connects a job to the store of `--sparse-ckpt-store`."""

import os
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from moevement_ext.config import ConfigurationError, SparseCheckpointConfig
from moevement_ext.store.answers import in_time

_TO_CONNECT = timedelta(seconds=60)
_RUN = 'run'


def meet_there(config: SparseCheckpointConfig, run_id: str, timeout: timedelta) -> None:
    """Make this process use the store of `--sparse-ckpt-store`, if given, from now on.

    Replaces the launcher's store in the environment. Called once, before the first rendezvous,
    whose limit is `timeout`. Raises `ConfigurationError` if no store answers there, or it serves
    another run than `run_id`.
    """
    if config.store is None:
        return
    host, port = config.store_address
    store = connect(host, port, min(timeout, _TO_CONNECT))
    served = store.compare_set(_RUN, '', run_id).decode()
    if served != run_id:
        raise ConfigurationError(
            f'--sparse-ckpt-store {config.store} serves the run {served}, not {run_id}: start a '
            'store for each job (moevement store).'
        )
    os.environ |= {
        'MASTER_ADDR': host,
        'MASTER_PORT': str(port),
        'TORCHELASTIC_USE_AGENT_STORE': 'True',
    }


def connect(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Connect to the store, which may still be starting, or raise `ConfigurationError`."""
    limit_s = timeout.total_seconds()
    try:
        return in_time(lambda: TCPStore(host, port, is_master=False, timeout=timeout), limit_s)
    except DistError as error:
        raise ConfigurationError(
            f'--sparse-ckpt-store {host}:{port} is not reached: start python -m '
            f'moevement_ext.store --host {host} --port {port} there ({_first_line(error)}).'
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ['no reason given'])[0]
