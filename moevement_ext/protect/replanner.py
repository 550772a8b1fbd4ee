# SPDX-License-Identifier: Apache-2.0
"""Follows the load of windows, and distributes new plans to all ranks.

Every rank publishes its measurements of a window to the launcher's store. Rank 0 decides, the first
rank of each stage plans the stage, and all ranks switch to the new plan at the same, later window
boundary. This uses no training communicator. A rank that receives a plan too late only loses one
window, because windows carry the plan's digest. The other ranks of a stage neither read the shares
of all experts of the model nor repeat the first rank's computation.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import InitVar, dataclass
from datetime import timedelta
from functools import partial

import msgspec
from torch.distributed import DistError, DistStoreError, Store

from moevement_ext.events import Replanned
from moevement_ext.logger import logger_of
from moevement_ext.membership import exchange
from moevement_ext.plan.replanning import Cycle, PlanParameters, WindowLoad
from moevement_ext.store_answers import peek, read_in_parts

logger = logger_of(__name__)

type Decide = Callable[[PlanParameters, Sequence[WindowLoad]], PlanParameters | None]

_FIRST_POLL_S = 0.02
_LAST_POLL_S = 0.32
_LOADS_KEPT = 4
VERSIONS_KEPT = 4
"""Plans kept in the store; the plan in force is the newest or the previous one."""
# Wait for the stage's first rank; if it is lost, its replacement hands the plan out.
_LONGEST_WAIT = timedelta(seconds=5)
_TIMEOUT = timedelta(seconds=10)
_PAUSE_S = 0.5  # after a lost connection

_OUT_OF_REACH = "the launcher's store is out of reach, so windows are not planned anew: %s"

_LOAD = msgspec.json.Decoder(WindowLoad)
_PARAMETERS = msgspec.msgpack.Decoder(PlanParameters)
_PLAN = msgspec.msgpack.Decoder(Cycle)


def packed(plan: Cycle) -> bytes:
    """Encode and compress a plan, as operator names repeat."""
    return exchange.packed(msgspec.msgpack.encode(plan))


def unpacked(content: bytes) -> Cycle:
    """Inverse of `packed`."""
    return _PLAN.decode(exchange.unpacked(content))


def event(plan: Cycle, operators: Collection[str]) -> Replanned:
    """The event of a rank with these operators that adopts a plan."""
    shares = plan.shares or {}
    return Replanned(
        origin=plan.origin,
        window=plan.plan.window,
        version=plan.version,
        shares={name: share for name, share in shares.items() if name in operators},
        interval=plan.period,
    )


def publish(store: Store, parameters: PlanParameters) -> None:
    """Publish the inputs of all stages' plans, for the first rank of each stage."""
    content = exchange.packed(msgspec.msgpack.encode(parameters))
    store.set(f'plan/{parameters.version}', content)  # type: ignore[arg-type]
    store.delete_key(f'plan/{parameters.version - VERSIONS_KEPT}')


def published(store: Store, version: int) -> PlanParameters:
    """Read published inputs by version; waits up to the store's timeout."""
    return _PARAMETERS.decode(exchange.unpacked(store.get(f'plan/{version}')))


def hand_out(store: Store, stage: int, plan: Cycle) -> None:
    """Store the plan for the other ranks of the stage, and delete the oldest plan."""
    store.set(f'plan/{plan.version}/{stage}', packed(plan))  # type: ignore[arg-type]
    store.delete_key(f'plan/{plan.version - VERSIONS_KEPT}/{stage}')


def handed_out(store: Store, stage: int, version: int) -> Cycle | None:
    """Read the plan of the stage; None if its first rank does not hand one out within seconds."""
    key = f'plan/{version}/{stage}'
    try:
        store.wait([key], _LONGEST_WAIT)
    except DistStoreError:
        if not store.check([key]):  # raises if the connection is lost
            return None
    return unpacked(store.get(key))


@dataclass(eq=False)
class Replanner:
    """Follows the load of the windows on a separate thread.

    Args:
        store: reachable by all ranks; used by this object's thread only.
        rank: rank of this process; rank 0 decides.
        decide: `Strategy.next` of the run; on rank 0.
        next_plan: returns the plan of this stage by version and store; None: not available yet.
        adopt: called on the replanner's thread with each new plan.
    """

    _store: Store
    _rank: int
    _world_size: int
    present: InitVar[Cycle]
    _decide: Decide
    _next_plan: Callable[[int, Store], Cycle | None]
    _adopt: Callable[[Cycle], None]

    def __post_init__(self, present: Cycle) -> None:
        self._store.set_timeout(_TIMEOUT)
        self._lost = False
        self._version = present.version
        # On rank 0: the plan to compare the next one with; without shares until they are read.
        self._present = PlanParameters(
            version=present.version,
            origin=present.origin,
            window=present.plan.window,
            idle=present.idle,
            experts=present.experts,
        )
        self._changed = threading.Condition()
        self._observed: WindowLoad | None = None
        self._published: deque[int] = deque()  # newest windows, with loads in the store
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name='sparse-ckpt-replan', daemon=True)
        self._thread.start()

    def observe(self, load: WindowLoad) -> None:
        """Record the load of a window. Training thread; never blocks."""
        with self._changed:
            self._observed = load
            self._changed.notify()

    def stop(self) -> None:
        self._stopping.set()
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        self._attempt(self._begin)
        while True:
            with self._changed:
                while self._observed is None and not self._stopping.is_set():
                    self._changed.wait()
                if self._stopping.is_set():
                    return
                load, self._observed = self._observed, None
            assert load is not None
            self._attempt(partial(self._publish, load))

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            if self._lost:  # torch's store does not reconnect (torch 2.15)
                self._store = self._store.clone()
            step()
            self._lost = False
        except DistError as error:
            if not self._lost:  # torch itself logs every further attempt
                logger.warning(_OUT_OF_REACH, error)
            self._lost = True
            self._stopping.wait(_PAUSE_S)
        except Exception:  # planning must not fail training; the current plan stays
            logger.warning('cannot re-plan', exc_info=True)

    def _begin(self) -> None:
        if self._rank == 0 and self._version > 0:  # the first plan has no shares
            self._present = published(self._store, self._version)
        self._follow()  # a rank that joins a running job learns of the next plan

    def _publish(self, load: WindowLoad) -> None:
        self._store.set(_load_key(load.start, self._rank), msgspec.json.encode(load).decode())
        self._published.append(load.start)
        if len(self._published) > _LOADS_KEPT:
            self._store.delete_key(_load_key(self._published.popleft(), self._rank))
        if self._rank == 0 and load.start >= self._present.origin:
            self._lead(load.start)
        self._follow()

    def _lead(self, start: int) -> None:
        """On rank 0: decide once every rank has published this window, unless it is outdated."""
        keys = [_load_key(start, rank) for rank in range(self._world_size)]
        pause_s = _FIRST_POLL_S
        while not self._store.check(keys):
            self._stopping.wait(pause_s)
            if self._stopping.is_set() or self._observed is not None:
                return
            pause_s = min(2 * pause_s, _LAST_POLL_S)
        loads = [_LOAD.decode(value) for value in read_in_parts(self._store, keys)]
        chosen = self._decide(self._present, loads)
        if chosen is not None:
            publish(self._store, chosen)
            self._store.set(_NEWEST, str(chosen.version))

    def _follow(self) -> None:
        newest = int(peek(self._store, _NEWEST) or 0)
        if newest <= self._version:
            return
        plan = self._next_plan(newest, self._store)
        if plan is None:  # tried again after the next window
            return
        if self._rank == 0:
            self._present = published(self._store, newest)
        self._version = newest
        self._adopt(plan)


_NEWEST = 'plan/newest'


def _load_key(start: int, rank: int) -> str:
    return f'load/{start}/{rank}'
