# SPDX-License-Identifier: Apache-2.0
"""A store for the ranks to meet in that no training node holds: `--sparse-ckpt-store`."""
