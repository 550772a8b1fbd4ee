# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job rendezvous, and how each rank detects the loss of another one."""
