# SPDX-License-Identifier: Apache-2.0
"""Megatron flags that exclude sparse checkpointing, or only its localized recovery.

`refused_flags` and `whole_job_flags` hold rules, each for some values of a flag. A flag without a
rule allows a localized recovery with equal bits. Its value is part of the identity of the run
(`job/identity.py`), so no job resumes from windows of another value. Therefore a new flag of
upstream needs a rule only once it is found to break recovery. `docs/compatibility.md` is generated
from the rules (`python -m tools.compatibility --write`).
"""
