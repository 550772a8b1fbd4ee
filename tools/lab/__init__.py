# SPDX-License-Identifier: Apache-2.0
"""Common base of the tools: jobs, their logs and events, models, statistics, reports."""
