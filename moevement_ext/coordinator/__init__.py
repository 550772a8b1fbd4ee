# SPDX-License-Identifier: Apache-2.0
"""What the processes of a job state, and what follows from it, on one board."""
