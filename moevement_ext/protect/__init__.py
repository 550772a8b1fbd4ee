# SPDX-License-Identifier: Apache-2.0
"""Protection of a running job: windows from capture to persistence, and their plans."""
