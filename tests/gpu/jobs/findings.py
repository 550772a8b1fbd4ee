# SPDX-License-Identifier: Apache-2.0
"""Settings of all checks, and what a check, or a part of it, has found."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple


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

    def folder(self, check: str) -> Path:
        """Empty folder for logs and states of a check; removes those of an earlier run."""
        folder = self.output / check
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder


class Findings(NamedTuple):
    """Measurements and problems of a check, or of a part of it."""

    figures: dict[str, Any]
    """Numbers, texts and tables of them; the summary shows all but tables."""
    problems: list[str]
    """One line each; empty if the check has passed."""
