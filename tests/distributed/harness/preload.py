# SPDX-License-Identifier: Apache-2.0
"""Work that the fork server does once instead of every worker."""

import gc

import pretrain_gpt

pretrain_gpt.warm_up(['--sparse-ckpt'])
# Or every worker's collector walks through all that was imported, and copies its pages.
gc.collect()
gc.freeze()
