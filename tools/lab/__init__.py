# SPDX-License-Identifier: Apache-2.0
"""What every tool rests on: jobs, their logs and events, models, statistics, reports."""
