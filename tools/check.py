# SPDX-License-Identifier: Apache-2.0
"""Reports the protection of a job from its flags, without starting it.

    moevement check -- --num-layers 32 --hidden-size 4096 ...
    moevement check --nproc 64 --json -- --num-layers 32 --hidden-size 4096 ...

After `--` come all flags of pretrain_gpt.py; --sparse-ckpt is implied. Refusals are those of the
start, in the same words. The tool looks for files and directories on this machine. For the host
memory of a job there is `moevement plan`.

Exit status: 0 the job would be protected, 2 the start would be refused, or a flag is wrong.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from moevement_ext.errors import EXIT_USER_ERROR

from .lab.figures import print_json
from .lab.programs import program, split_at_end
from .lab.trainer_flags import prepare_megatron

if TYPE_CHECKING:
    from megatron.moevement.checking import Judgement

_LOCALIZED = 'a failure is recovered only on the stages that lost a worker'
_UNDER = ', under a launcher that keeps the others running (docs/start.md)'
_GLOBAL = 'after a failure all stages roll back together, in the living processes'
_WHOLE_JOB = 'a failure restarts all workers, which recover together from windows in host memory'


def main(argv: Sequence[str] | None = None) -> int:
    own, flags = split_at_end(argv)
    parser = program('check', __doc__)
    parser.set_defaults(nproc=os.environ.get('WORLD_SIZE'))
    args = parser.parse_args(own)
    if not flags:
        parser.error('give -- and the flags of the job')
    prepare_megatron()
    with warnings.catch_warnings(action='ignore'):  # about packages that only training needs
        from megatron.moevement.checking import judge

    judgement = judge(flags, args.nproc)
    if args.json:
        found = {name: getattr(judgement, name) for name in ('protected', 'localized')}
        print_json(found | asdict(judgement))
    else:
        print('\n'.join(_lines(judgement)))
    return 0 if judgement.protected else EXIT_USER_ERROR


def _lines(judgement: 'Judgement') -> list[str]:
    lines = [f'refused: {one}' for one in judgement.refused]
    lines += [f'whole job only: {one}' for one in judgement.whole_job]
    lines += [f'note: {one}' for one in judgement.notes]
    lines += [f'setting: {one}' for one in judgement.settings]
    if not judgement.protected:
        return [*lines, f'protected: no, a job of world size {judgement.ranks} would not start']
    if judgement.whole_job:
        how = _WHOLE_JOB
    else:
        how = f'{_GLOBAL if judgement.together else _LOCALIZED}{_UNDER}'
    yes_or_no = 'yes' if judgement.localized else 'no'
    return [*lines, f'protected: yes; localized: {yes_or_no}: {how}; world size {judgement.ranks}']


if __name__ == '__main__':
    raise SystemExit(main())
