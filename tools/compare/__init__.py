# SPDX-License-Identifier: Apache-2.0
"""Compares ways to survive failures, with the same job and the same failures."""
