# SPDX-License-Identifier: Apache-2.0
"""The node below a job: its processes and signals, its GPUs before a collective hangs on them."""
