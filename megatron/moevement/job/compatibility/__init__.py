# SPDX-License-Identifier: Apache-2.0
"""Flags of Megatron that do not go with sparse checkpointing, or not with a localized recovery.

`refused_flags` and `whole_job_flags` hold rules, for some values of a flag. What no rule names is
recovered locally, bit for bit; and as it counts in the identity of the run (`job/identity.py`), no
job goes on from windows of another value. So a flag that upstream adds needs no entry before it is
found to break recovery. `docs/compatibility.md` is written from the rules
(`python -m tools.compatibility --write`).

Checked against megatron-core 0.19.2, by reading its code.
"""
