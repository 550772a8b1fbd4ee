# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

from moevement_ext.job.whole_job import WholeJob


def test_the_pipeline_is_taken_over_before_training_though_nothing_is_logged() -> None:
    """Its exchanges wait for less of the device than those of upstream."""
    order: list[object] = []
    trainer = SimpleNamespace(pipeline=SimpleNamespace(log_to=order.append))
    protection = SimpleNamespace(drain=lambda: order.append('drained'))
    job = WholeJob(SimpleNamespace(), trainer, protection, None)  # type: ignore[arg-type]
    job.train(lambda: order.append('trained'))
    assert order == [None, 'trained', 'drained']
