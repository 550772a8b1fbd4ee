# SPDX-License-Identifier: Apache-2.0
"""What the fork server does once, so that no worker has to."""

import gc

import pretrain_gpt  # noqa: F401

# Or every worker's collector walks through all that was imported, and copies its pages.
gc.collect()
gc.freeze()
