# SPDX-License-Identifier: Apache-2.0
"""A store outside the training nodes (`--sparse-ckpt-store`)."""
