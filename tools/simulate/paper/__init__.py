# SPDX-License-Identifier: Apache-2.0
"""The numbers that the MoEvement paper prints, and results computed from its own inputs."""
