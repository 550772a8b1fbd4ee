# SPDX-License-Identifier: Apache-2.0
"""What the MoEvement paper prints, and what follows from its own inputs."""
