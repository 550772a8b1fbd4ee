# SPDX-License-Identifier: Apache-2.0
"""Settings of all stages."""

import shutil
from pathlib import Path
from typing import NamedTuple


class Settings(NamedTuple):
    """Output folders and device of a check."""

    output: Path
    """Folder of the results and all other output."""
    memory: Path
    """Directory in a tmpfs for windows."""
    gpu: bool
    """False: a dry run on the CPU, over gloo, with tiny models."""

    @property
    def backend(self) -> str:
        return 'nccl' if self.gpu else 'gloo'

    def folder(self, stage: str) -> Path:
        """Empty folder for logs and states of a stage; removes those of an earlier run."""
        folder = self.output / stage
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder
