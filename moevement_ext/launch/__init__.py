# SPDX-License-Identifier: Apache-2.0
"""Launcher that emulates several nodes on one machine and replaces only the worker that died."""
