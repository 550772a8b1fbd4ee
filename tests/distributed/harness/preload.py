# SPDX-License-Identifier: Apache-2.0
"""Modules that the fork server imports once for all workers."""

import gc

import pretrain_gpt

pretrain_gpt.warm_up(['--sparse-ckpt'])
# Otherwise the collector of every worker visits all imported objects, and copies their pages.
gc.collect()
gc.freeze()
