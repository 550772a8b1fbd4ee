# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job: how they meet, know of each other, and notice who is gone."""
