# SPDX-License-Identifier: Apache-2.0
"""What all stages are told."""

import shutil
from pathlib import Path
from typing import NamedTuple


class Settings(NamedTuple):
    """Where one check of a GPU writes, and on which device it runs."""

    output: Path
    """Folder for the results and everything the stages write."""
    memory: Path
    """Directory in a tmpfs, for windows."""
    gpu: bool
    """False: a dry run on the CPU, over gloo, with tiny models."""

    @property
    def backend(self) -> str:
        """Backend of the process groups: nccl or gloo."""
        return 'nccl' if self.gpu else 'gloo'

    def folder(self, stage: str) -> Path:
        """For logs and states of a stage; what an earlier run left there is removed."""
        folder = self.output / stage
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder
