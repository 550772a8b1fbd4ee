# SPDX-License-Identifier: Apache-2.0
"""A running job in the terminal."""
