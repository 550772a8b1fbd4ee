# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each is a program, `python -m tools.bench.<name>`."""
