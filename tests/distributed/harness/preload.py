# SPDX-License-Identifier: Apache-2.0
"""What the fork server does once, so that no worker has to."""

import gc

import pretrain_gpt

pretrain_gpt.warm_up(['--sparse-ckpt'])
# Or every worker's collector walks through all that was imported, and copies its pages.
gc.collect()
gc.freeze()
