# SPDX-License-Identifier: Apache-2.0
"""What a stage has sent, kept for neighbours that replay (paper section 3.4)."""
