# SPDX-License-Identifier: Apache-2.0
"""Which flags of Megatron go with which kind of recovery: one list, of every flag there is.

`refused` and `whole_job` hold rules, for some values of a flag; `exact` and `without_effect` name
all other flags, with what shows that they may stay. `docs/compatibility.md` is made from it
(`python -m tools.compatibility --write`). A flag at its default never matters.

Checked against megatron-core 0.19.2, by reading its code; where a test shows it, the list says so.
"""
