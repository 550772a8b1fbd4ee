# SPDX-License-Identifier: Apache-2.0
"""Kills ranks when another rank reaches a point of its replay.

The one that replays waits there until all have met, or until it has to leave: how fast the machine
notices a death does not decide how far it has come by then.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.training import get_args

from moevement_ext import faults
from moevement_ext.faults import Phase
from moevement_ext.membership.membership import Membership
from moevement_ext.recover.stage_replay import StageReplay

_POLL_S = 0.01


class Kill(NamedTuple):
    rank: int
    """The rank that replays."""
    iteration: int
    """In which it, or another one of its stage, was lost."""
    phase: Phase
    victim: int
    occurrence: int = 0
    """Number of the times before, in this process, that it has come to that point."""


FAR_AND_NEAR = (
    Kill(0, 26, Phase.FETCH, 3),
    Kill(0, 32, Phase.CONVERT, 2),
    Kill(0, 32, Phase.CATCH_UP, 3),
    Kill(3, 38, Phase.REPLAYED, 1),
    Kill(0, 44, Phase.CATCH_UP, 1),
)
WITHOUT_END = tuple(
    Kill(0, 8, phase, 3, occurrence)
    for phase, occurrences in ((Phase.LOAD, 3), (Phase.CATCH_UP, 2), (Phase.REPLAYED, 1))
    for occurrence in range(occurrences)
)
OF_STAGES_OF_TWO = (
    Kill(1, 8, Phase.CONVERT, 4),
    Kill(0, 8, Phase.CATCH_UP, 5),
    Kill(5, 14, Phase.CATCH_UP, 4),
)


def far_and_near_ones_die() -> None:
    _arrange(FAR_AND_NEAR)


def the_last_stage_dies_again_and_again() -> None:
    """More often than the first one, which replays, comes to an end."""
    _arrange(WITHOUT_END)


def ranks_of_stages_of_two_die() -> None:
    """Far ones first, then one of the same stage."""
    _arrange(OF_STAGES_OF_TWO)


def _arrange(kills: Sequence[Kill]) -> None:
    run, point, delegated_to = StageReplay.run, faults.point, Membership.delegated_to
    members: list[Membership] = []
    lost_in: list[int] = []
    seen: dict[Phase, int] = {}

    def noted(membership: Membership, beside: Any) -> Any:
        members[:] = [membership]
        return delegated_to(membership, beside)

    def run_noted(replay: StageReplay, verdict: Any, *args: Any) -> None:
        lost_in[:] = [verdict.target + 1]
        seen.clear()
        run(replay, verdict, *args)

    def point_and_kill(phase: Phase) -> None:
        point(phase)
        if not lost_in:
            return
        occurrence = seen.get(phase, 0)
        seen[phase] = occurrence + 1
        rank = int(os.environ['RANK'])
        for kill in kills:
            if kill == Kill(rank, lost_in[0], phase, kill.victim, occurrence):
                _carry_out(kill, members[0])

    StageReplay.run = run_noted  # type: ignore[method-assign]
    Membership.delegated_to = noted  # type: ignore[method-assign]
    faults.point = point_and_kill


def _carry_out(kill: Kill, membership: Membership) -> None:
    done = Path(get_args().sparse_ckpt_digest).parent / f'killed-{"-".join(map(str, kill))}'
    try:
        done.touch(exist_ok=False)
    except FileExistsError:
        return
    round = membership._joined.result.round
    os.kill(membership._joined.reports[kill.victim].process, signal.SIGKILL)
    while membership._joined.result.round == round and not membership.broken:
        time.sleep(_POLL_S)
