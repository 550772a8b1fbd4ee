# SPDX-License-Identifier: Apache-2.0
"""Recovery from the windows of another parallel layout: finds, fetches and rewrites them."""
