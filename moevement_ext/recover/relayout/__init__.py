# SPDX-License-Identifier: Apache-2.0
"""Another parallel layout picks up the windows of a job: found, fetched in ranges, written anew."""
