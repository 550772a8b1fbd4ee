# SPDX-License-Identifier: Apache-2.0
"""One protected job, seen from one rank: set-up, modes, end."""
