# SPDX-License-Identifier: Apache-2.0
"""The coordinator is killed, or stopped for good: training does not notice."""

import signal
import time
from pathlib import Path

import pytest

from tools.chaos.configuration import BF16, RUN_ID, Configuration, parse_layout
from tools.chaos.drawing import Fault
from tools.chaos.injecting import FaultInjector
from tools.chaos.results import FaultRecord
from tools.lab.evidence import Tier, persisted
from tools.lab.job import Job, Kind, memory_directory, train
from tools.lab.launch import Launcher
from tools.lab.models import prepare_text

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]

HANG_S = 8
ITERATIONS = 120
CONFIGURATION = Configuration(
    parse_layout('pp2'), BF16, ('dropout',), window=2, nodes=2, hang_timeout_s=HANG_S
)
IN_RECOVERIES = [
    Fault(Kind.COORDINATOR, (1,), after=2, phase=0.5),
    Fault(Kind.COORDINATOR, (1,), after=1, phase=0.0, apart_s=-0.5),
    Fault(Kind.COORDINATOR, (0,), after=3, phase=0.9, apart_s=0.3),
    Fault(Kind.STILL, (1,), after=2, phase=0.2),
    Fault(Kind.STILL, (0,), after=1, phase=0.2, apart_s=-0.4),
]


@pytest.mark.parametrize('launcher', Launcher)
def test_coordinator_is_lost_between_and_during_recoveries(
    launcher: Launcher, tmp_path: Path
) -> None:
    configuration = CONFIGURATION._replace(launcher=launcher)
    data = prepare_text(tmp_path / 'data', 1)
    folder = tmp_path / 'plain'
    flags = configuration.training_flags(data, ITERATIONS, folder)
    plain = train(configuration.launch(folder, flags))
    records: list[FaultRecord] = []
    lost: list[object] = []

    def persists_again(job: Job, since: float) -> None:
        for _ in job.follow('a window that is persisted'):
            if persisted(job.events(), job.pids(), since):
                return
        raise AssertionError('the job ended before')

    def hurt(job: Job) -> None:
        persists_again(job, 0.0)
        job.signal_coordinator(signal.SIGKILL)
        persists_again(job, time.time())
        job.signal_coordinator(signal.SIGSTOP)
        persists_again(job, time.time())
        injector = FaultInjector(job, ITERATIONS, lambda one, line: records.append(one))
        injector.inject_all(IN_RECOVERIES)
        lost.extend(job.unexpected)

    with memory_directory() as memory:
        folder = tmp_path / 'disturbed'
        flags = configuration.training_flags(data, ITERATIONS, folder)
        flags += configuration.sparse_flags(memory, folder)
        launch = configuration.launch(folder, flags, max_restarts=20)
        disturbed = train(launch, hurt, launcher, memory / RUN_ID)
    assert disturbed.different(plain) == []
    assert [one.tier for one in records] == [Tier.LOCALIZED] * len(IN_RECOVERIES)
    assert not lost and not any(one.lost for one in records)
