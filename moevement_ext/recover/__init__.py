# SPDX-License-Identifier: Apache-2.0
"""Finds, agrees on and converts windows after a failure."""
