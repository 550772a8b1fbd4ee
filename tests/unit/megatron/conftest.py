# SPDX-License-Identifier: Apache-2.0
"""Upstream's modules are imported for a CPU."""

from megatron.moevement.seams import cpu_device

cpu_device.install()
