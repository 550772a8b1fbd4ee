# SPDX-License-Identifier: Apache-2.0
"""Replication: copies of a rank's captured state in the host memory of peers."""
