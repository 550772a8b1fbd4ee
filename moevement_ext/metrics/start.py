# SPDX-License-Identifier: Apache-2.0
"""What this rank records, by its flags and its environment."""

import logging
from pathlib import Path

from moevement_ext.config import ConfigurationError, node_name
from moevement_ext.errors import HostMemoryError
from moevement_ext.membership.rank import Rank
from moevement_ext.metrics import opentelemetry
from moevement_ext.metrics.instruments import Recorder
from moevement_ext.metrics.observer import Observer
from moevement_ext.metrics.prometheus import PrometheusRecorder

logger = logging.getLogger(__name__)


def observe(rank: Rank) -> Observer | None:
    """Record the events of a rank from now on; None: nobody wants metrics.

    Raises:
        ConfigurationError: `--sparse-ckpt-metrics` is given and its library is missing; a process
            that joins a running job goes on without metrics.
    """
    config, recorders = rank.config, list[Recorder]()
    name = (rank.run_id, node_name(), rank.number)
    if config.metrics is not None:
        try:
            recorders.append(PrometheusRecorder(config.metrics, Path(config.dir), *name))
        except (HostMemoryError, OSError) as error:  # costs the metrics, and not the training
            logger.warning('no metrics for Prometheus: %s', error)
        except ConfigurationError as error:  # of this node: the others train and wait for it
            if not rank.exchange.joining:
                raise
            logger.warning('no metrics for Prometheus: %s', error)
    if opentelemetry.wanted():
        try:
            recorders.append(opentelemetry.OpenTelemetryRecorder(*name))
        except ConfigurationError as error:  # the variables may be there for other programs
            logger.warning('no metrics over OTLP: %s', error)
    if not recorders:
        return None
    observer = Observer(recorders)
    rank.events.listeners.append(observer.event)
    return observer
