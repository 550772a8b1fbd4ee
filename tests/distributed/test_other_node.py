# SPDX-License-Identifier: Apache-2.0
"""A replacement runs on a node with fewer resources than the lost node."""

from pathlib import Path

from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.setups import TWO_STAGES


def test_replacement_works_without_optional_resources_of_its_node(
    cluster: Make, reference: Reference, tmp_path: Path
) -> None:
    """Caches of data, dense checkpoints to load, windows on disk, a folder for events."""
    local = {name: tmp_path / name for name in ('cache', 'load', 'disk')}
    local['disk'].mkdir()
    job = cluster(*TWO_STAGES, '--sparse-ckpt-window', '3', '--load', str(local['load']), ranks=2)
    job.flags += ['--data-cache-path', str(local['cache'])]
    job.flags += ['--sparse-ckpt-disk', str(local['disk'])]
    events = job.directory / 'events'

    def another_node(rank: int, nodes: object) -> None:
        for folder in local.values():
            if folder.exists():
                folder.rename(folder.with_name(f'{folder.name}-elsewhere'))
        events.rename(events.with_name('events-elsewhere'))
        events.touch()

    job._wipe = another_node
    assert job.survive(fail_at='1:8:forward') == {1: 1}
    assert differences(reference(*TWO_STAGES, ranks=2), read_digest(job)) == []
    output = job.output(attempt=0)
    assert 'the data cache cannot be used on node1' in output
    assert 'goes on without: --sparse-ckpt-events' in output
    assert f'--sparse-ckpt-disk {local["disk"]} is no directory' in output
    assert 'recovered at iteration: ' in output
