# SPDX-License-Identifier: Apache-2.0
"""Work that the fork server does once instead of every worker."""

import gc

import pretrain_gpt
import tests.distributed.harness.cluster  # noqa: F401  # with the body of a worker: imports pytest

pretrain_gpt.warm_up(['--sparse-ckpt'])
# Otherwise the collector of every worker visits all imported objects, and copies their pages.
gc.collect()
gc.freeze()
