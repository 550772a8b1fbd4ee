# SPDX-License-Identifier: Apache-2.0
"""A process without a place in the layout, which only serves the windows of its node."""

import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec
from torch.distributed import DistError, DistStoreError, Store

from moevement_ext.config import SparseCheckpointConfig, node_name
from moevement_ext.job.ending import announce
from moevement_ext.logger import logger_of
from moevement_ext.membership.exchange import leave
from moevement_ext.membership.mailbox import write_joining
from moevement_ext.membership.rendezvous import launcher_store
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.shelf import base_of
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.recover.reshard import surplus
from moevement_ext.recover.reshard.stock import shelf_of, take_stock
from moevement_ext.recover.reshard.surplus import Call, Dismissed, LetGo, Message, SurplusAnswer
from moevement_ext.replicate.own_address import host_identity, local_host
from moevement_ext.replicate.replica_server import ReplicaServer
from moevement_ext.replicate.secret import given_in, of_attempt
from moevement_ext.store.server import use_outside_store

logger = logger_of(__name__)

_LOOKS_FOR_ITS_LAUNCHER = timedelta(seconds=2)
_LOST = 1


class SurplusRank:
    """Runs instead of a job in a process that does not train. Main thread.

    `identity` is that of any rank that trains. `timeout` is the maximum wait for rank 0, and for
    the next run attempt after the end of one.
    """

    def __init__(
        self,
        identity: RankIdentity,
        config: SparseCheckpointConfig,
        run_id: str,
        timeout: timedelta,
    ) -> None:
        self._identity = identity
        self._config = config
        self._run_id = run_id
        self._timeout = timeout
        self._rank = surplus.own_rank()
        self._launcher = os.getppid()
        self._server: ReplicaServer | None = None
        self._runs: list[str] = []

    def serve(self) -> int:
        """Handle rank 0's messages until the job ends; returns the exit status.

        Raises `UserError` if another job has the run's windows, or if this node is not
        reachable.
        """
        use_outside_store(self._config, base_of(self._run_id), self._timeout)
        print(
            f' sparse ckpt | rank {self._rank} does not train: the layout has no place for it | '
            f'it serves the windows of node {node_name()} |',
            flush=True,
        )
        try:
            return self._obey(surplus.meeting_place(self._timeout))
        except DistError as error:
            logger.warning('rank %d, which did not train, has lost the job: %s', self._rank, error)
            return _LOST
        finally:
            self._stop_serving()

    def _obey(self, store: Store) -> int:
        self._tell_launcher()
        number = store.add(surplus.MESSAGES, 0)
        message = self._message(store, number) if number else None
        if isinstance(message, Call):  # of this start, or of an earlier one, which does no harm
            self._answer(store, number, message)
        ended = isinstance(message, Dismissed)
        while True:
            number += 1
            message = self._message(store, number, self._timeout if ended else None)
            ended = False
            if isinstance(message, Call):
                self._answer(store, number, message)
            elif isinstance(message, LetGo):
                self._free()
            else:
                return self._end(message)

    def _end(self, message: Dismissed | None) -> int:
        """End with the job; without a message, the job ended before this process began."""
        if message is None:
            return 0
        if message.freed:
            self._free()
            # This rank may have trained in an earlier start.
            shelf_of(self._config, self._run_id).remove([self._run_id])
        announce(self._rank, message.code)
        return message.code

    def _free(self) -> None:
        self._stop_serving()
        shelf_of(self._config, self._run_id).remove(self._runs)

    def _tell_launcher(self) -> None:
        with suppress(DistError):
            launcher = launcher_store(self._timeout)
            if launcher is not None:
                write_joining(launcher, self._rank)

    def _message(self, store: Store, number: int, limit: timedelta | None = None) -> Message | None:
        """A message by number; None if not in time. `DistError`: store or launcher is gone."""
        key, waited = surplus.key_of(number), timedelta()
        decode = msgspec.msgpack.Decoder(Message).decode
        while True:
            try:
                store.wait([key], _LOOKS_FOR_ITS_LAUNCHER)
                message: Message = decode(store.get(key))
                return message
            except DistStoreError:  # not yet
                waited += _LOOKS_FOR_ITS_LAUNCHER
            if os.getppid() != self._launcher:
                raise DistError('its launcher is gone')
            if limit is not None and waited > limit:
                return None

    def _answer(self, store: Store, number: int, call: Call) -> None:
        """Leave this node's stock in the store, and serve it from now on."""
        self._stop_serving()
        shelf = shelf_of(self._config, self._run_id)
        stock = take_stock(self._identity, self._config, shelf)
        secret, address = given_in(os.environ), ('', 0)
        if secret is not None:
            several = set(call.hosts) != {host_identity()}
            host = local_host(self._config.interface, several)
            node = NodeStore(Path(self._config.dir), self._run_id, node_name())
            secret = of_attempt(secret, call.salt)
            self._server = ReplicaServer(node, self._rank, {}, secret, host)
            self._server.serve_shelf(shelf)
            address = self._server.address
        self._runs = stock.runs
        answer = msgspec.msgpack.encode(SurplusAnswer(stock, *address))
        leave(store, surplus.answers_to(number), self._rank, answer)
        store.set(surplus.answered(number, self._rank), '1')

    def _stop_serving(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
