# SPDX-License-Identifier: Apache-2.0
r"""A hand-written Megatron-Core training loop that survives failures: `megatron.moevement.attach`.

    moevement prepare-data --input README.md docs/*.md --output-prefix /tmp/text
    moevement launch --nodes 4 --spares 1 --kill 2@30 -- \
        examples/own_loop.py --data /tmp/text --iterations 200

The model and its training step are in `small_gpt.py`, an ordinary Megatron-Core program.
"""

import argparse
import os
from functools import partial
from pathlib import Path

from examples import small_gpt  # the first import of Megatron
from megatron.moevement import SparseCheckpointConfig, TrainingPlan, attach

MOEVEMENT_SPARES = True  # a hot spare may import this program in advance


def main() -> None:
    """Train; the lines with `job` add protection."""
    options = parse_arguments()
    configurations = small_gpt.configurations(int(os.environ.get('WORLD_SIZE', '1')))
    plan = TrainingPlan(
        train_iters=options.iterations,
        seq_length=small_gpt.SEQUENCE,
        micro_batch_size=2,
        global_batch_size=16,
        backend=small_gpt.BACKEND,
        log_interval=10,
    )
    sparse = SparseCheckpointConfig(
        window=4, dir=options.dir, run_id=options.run_id, events=options.events
    )
    with attach(sparse, *configurations, plan, settings={'data': options.data}) as job:
        job.init_process_group()
        built = job.set_up(partial(small_gpt.build, *configurations))
        train_step = partial(small_gpt.train_step, built, plan)

        def loop() -> None:  # called again after a failure of other ranks
            while job.iteration < plan.train_iters:
                loss = job.step(train_step)
                if loss is not None:
                    print(
                        f'iteration {job.iteration}/{plan.train_iters} | lm loss: {loss:.6f} |',
                        flush=True,
                    )

        job.train(loop, partial(small_gpt.batches, options.data, plan))
        if options.digest is not None:
            job.write_digest(options.digest)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog='own_loop', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        '--data', type=Path, required=True, help='prefix given to moevement prepare-data'
    )
    parser.add_argument('--iterations', type=int, default=100)
    parser.add_argument('--dir', default=SparseCheckpointConfig.dir, help='for windows, in a tmpfs')
    parser.add_argument('--run-id', help='name of the run; give the same one to resume')
    parser.add_argument('--events', metavar='DIR', help='write events as JSON lines')
    parser.add_argument('--digest', type=Path, metavar='FILE', help='write digests of the state')
    given = parser.parse_args()
    if not Path(f'{given.data}.bin').is_file():  # a user error: no launcher restarts this rank
        parser.error(
            f'--data {given.data}: {given.data}.bin does not exist (see moevement prepare-data)'
        )
    return given


if __name__ == '__main__':
    main()
