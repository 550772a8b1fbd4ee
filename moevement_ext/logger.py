# SPDX-License-Identifier: Apache-2.0
"""Loggers of the engine and the adapter. Their messages name the product."""

import logging


def logger_of(module: str) -> logging.Logger:
    """Logger of a module, by its `__name__`; the program's own logging decides the rest."""
    logger = logging.getLogger(module)
    logger.addFilter(_prefixed)
    return logger


def _prefixed(record: logging.LogRecord) -> bool:
    record.msg = f'sparse checkpointing: {record.msg}'
    return True
