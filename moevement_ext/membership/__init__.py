# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job: how they meet, and how each notices that another one is gone."""
