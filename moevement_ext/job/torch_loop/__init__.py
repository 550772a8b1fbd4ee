# SPDX-License-Identifier: Apache-2.0
"""A trainer for loops on plain torch: modules, optimizers, stages of a pipeline."""
