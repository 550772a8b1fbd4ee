# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the machine, the job that is measured, statistics, reports."""
