# SPDX-License-Identifier: Apache-2.0
"""Examples of use."""
