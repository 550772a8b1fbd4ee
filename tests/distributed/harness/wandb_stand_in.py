# SPDX-License-Identifier: Apache-2.0
"""Stands in for W&B's package, as a mutation: notes the runs that upstream begins."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

RUNS = 'runs'
"""File in W&B's folder, with a line for each beginning: id, how to resume."""


def install() -> None:
    def init(dir: str, **_: Any) -> None:
        with (Path(dir) / RUNS).open('a') as file:
            file.write(f'{os.environ.get("WANDB_RUN_ID")} {os.environ.get("WANDB_RESUME")}\n')

    def ignore(*_: Any, **named: Any) -> None:
        pass

    module = ModuleType('wandb')
    vars(module).update(init=init, log=ignore, finish=ignore, config=SimpleNamespace(update=ignore))
    sys.modules['wandb'] = module
