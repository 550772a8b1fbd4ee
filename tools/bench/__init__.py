# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, each a subcommand of `moevement bench`."""
