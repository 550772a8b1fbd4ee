# SPDX-License-Identifier: Apache-2.0
"""A rank of two puts its part of a window together that four ranks have left on two nodes."""

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from moevement_ext.capture.layout import OperatorSlices, TensorSlice
from moevement_ext.config import SparseCheckpointConfig, node_name
from moevement_ext.errors import HostMemoryError, UserError
from moevement_ext.job.other_layouts import OtherLayouts
from moevement_ext.memory.holder_lock import StoreInUseError
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.shelf import Shelf, directories_of
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.generations import OwnerWindows
from moevement_ext.memory.window.name import RankIdentity, Window, WindowName
from moevement_ext.memory.window.refusal import RefusedWindow, UnreadableWindow
from moevement_ext.memory.window.settings import Layout, Placed, Seat
from moevement_ext.memory.window.slot import FORMAT_VERSION, SlotContext, SlotHeader, decode_context
from moevement_ext.recover import inventory
from moevement_ext.recover.conversion import Conversion
from moevement_ext.recover.reshard.assembly import Assembly
from moevement_ext.recover.reshard.found import Candidate, Elsewhere, Stock, merged, take_stock
from moevement_ext.recover.reshard.index import Division
from moevement_ext.recover.reshard.resharded import Fetcher, ReshardedWindow, resharded
from moevement_ext.replicate.client import PeerLost, PeerRefused, ReplicaClient
from moevement_ext.replicate.replica_server import ReplicaServer
from tests.unit.memory.samples import SECRET

OWNERS, ELEMENTS, START, WINDOW = 4, 64, 7, 2
OLD, NEW = 'run.aaaaaaaa', 'run.bbbbbbbb'
NAME = WindowName(START, 'plan')
LAYOUT = Layout(OWNERS, data=OWNERS)
MASTER = torch.arange(ELEMENTS, dtype=torch.float32)
WEIGHT = MASTER.bfloat16()
# `one` is in full in slot 0, `two` in slot 1.
FULL = [['one'], ['two']]
WEIGHTS = [['two'], []]


class Resharding:
    """Names tensors as they are, without the number of their rank."""

    def refuse(self, was: Layout) -> None: ...

    def name_of(self, operator: str, tensor: str, seat: Seat) -> str:
        return tensor.partition('.')[2]

    def division_of(self, operator: str, part: str, tensor: str, owner: int | None) -> Division:
        return Division()

    def state_owners(self, seats: Mapping[int, Seat]) -> list[int]:
        return [2]

    def auxiliary_state(self, states: Mapping[int, bytes]) -> bytes:
        assert [*states] == [2]
        return b'resharded ' + states[2]

    def kept(self, was: Layout) -> str:
        return ''


def placed(rank: int, layout: Layout = LAYOUT) -> Placed:
    return Placed('training', layout, Seat(data=rank))


def slices(operator: str, rank: int, of: int) -> OperatorSlices:
    """What a rank of so many captures of an operator: an even share of it."""
    start, end = ELEMENTS * rank // of, ELEMENTS * (rank + 1) // of
    tensor = f'rank{rank}.{operator}.weight'
    number = 1000 * (operator == 'two')
    full = TensorSlice(operator, tensor, 'master', start, end, number + MASTER[start:end])
    step = TensorSlice(operator, tensor, 'step', 0, 1, torch.tensor([3.0]))
    weights = TensorSlice(operator, tensor, 'weight', start, end, number + WEIGHT[start:end])
    return OperatorSlices((full, step), (weights,))


def captured(windows: OwnerWindows, owner: int) -> WindowFile:
    file = windows.begin(NAME)
    assert file is not None
    for slot in range(WINDOW):
        held = [slices(name, owner, OWNERS).full for name in FULL[slot]]
        held += [slices(name, owner, OWNERS).weights for name in WEIGHTS[slot]]
        records, content = [], b''
        for item in (item for kind in held for item in kind):
            data = item.source.view(torch.uint8).numpy().tobytes()
            records.append(item.record(len(content)))
            content += data + bytes(-len(data) % 64)
        context = SlotContext(FULL[slot], WEIGHTS[slot], f'state {owner} {slot}'.encode())
        header = SlotHeader(
            FORMAT_VERSION, 'old', 'old', owner, START, WINDOW, slot, START + slot, 'plan',
            len(content), records, msgspec.msgpack.encode(context), b'', placed(owner),
        )  # fmt: skip
        file.reserve_slot(slot, len(content))[:] = np.frombuffer(content, np.uint8)
        file.seal_slot(header)
    windows.commit(file)
    return file


def leave(shm: Path, copies: Mapping[str, list[tuple[int, int]]], run: str = OLD) -> None:
    """Windows of the old layout: of each node holders and owners."""
    for node, held in copies.items():
        store = NodeStore(shm, run, node)
        for holder, owner in held:
            captured(OwnerWindows(store, holder, owner, 2**17), owner)
        store.close()


SPREAD = {'a': [(0, 0), (1, 1), (0, 2)], 'b': [(2, 2), (3, 3), (2, 0)]}


class Job:
    """Rank 0 of two, which sees node a; rank 1 serves what it sees of node b."""

    def __init__(self, shm: Path, stack: ExitStack) -> None:
        self.shelves = [Shelf(NodeStore(shm, NEW, node), None) for node in ('a', 'b')]
        store = NodeStore(shm, NEW, 'b')
        self.server = ReplicaServer(store, 1, {}, SECRET)
        stack.callback(self.server.stop)
        self.server.serve_shelf(self.shelves[1])
        self.stack = stack

    def found(self) -> Candidate:
        (candidate,) = merged([stock(shelf) for shelf in self.shelves])
        return candidate

    def client(self, rank: int) -> ReplicaClient:
        assert rank == 1
        client = ReplicaClient(self.server.address, SECRET)
        self.stack.callback(client.close)
        return client

    def window(self, rank: int = 0, of: int = 2) -> tuple[ReshardedWindow, Fetcher]:
        candidate = self.found()
        fetcher = Fetcher(0, self.shelves[0], candidate.holders, self.client)
        identity = RankIdentity('new', 'new', rank, placed=placed(rank, Layout(of, data=of)))
        own = {name: slices(name, rank, of) for name in ('one', 'two')}
        window = ReshardedWindow(
            identity, own, Resharding(), fetcher, candidate.seats, range(OWNERS),
            resharded(candidate.window, 'new', 'history'),
        )  # fmt: skip
        return window, fetcher


def stock(shelf: Shelf) -> Stock:
    identity = RankIdentity('new', 'new', 0, placed=placed(0, Layout(2, data=2)))
    return take_stock(identity, SparseCheckpointConfig(), shelf)


def damage(paths: Iterable[Path]) -> None:
    for path in paths:
        content = bytearray(path.read_bytes())
        content[2**16 + 5] ^= 1
        path.write_bytes(content)


@pytest.fixture
def job(shm: Path) -> Iterator[Callable[..., Job]]:
    with ExitStack() as stack:
        yield lambda copies=SPREAD: leave(shm, copies) or Job(shm, stack)


def written(window: ReshardedWindow, path: Path) -> list[SlotHeader]:
    file = WindowFile.create(path, 2**18)
    file.begin(window.window.name)
    window.write(file)
    file.freeze()
    headers = file.verify(Expected('new', 'new', name=window.window.name))
    for header in headers:
        for record in header.records:
            data = file.payload(header.slot)[record.offset : record.offset + record.nbytes]
            (item,) = [
                item
                for kind in slices(record.operator, header.owner, 2)
                for item in kind
                if item.part == record.part
            ]
            assert data.tobytes() == item.source.view(torch.uint8).numpy().tobytes()
    return headers


@pytest.mark.parametrize('rank', [0, 1])
def test_part_has_the_names_of_its_rank(rank: int, job: Callable[..., Job], tmp_path: Path) -> None:
    window, fetcher = job().window(rank)
    headers = written(window, tmp_path / 'w')
    name = window.window.name
    assert (name.start, name.history, window.window.length) == (START, 'history', WINDOW)
    assert name != resharded(Window(WindowName(START, 'other'), WINDOW), 'new', 'history').name
    assert [(header.owner, header.iteration) for header in headers] == [(rank, 7), (rank, 8)]
    assert {header.placed for header in headers} == {placed(rank, Layout(2, data=2))}
    contexts = [decode_context(header.context) for header in headers]
    assert [(one.full, one.weights) for one in contexts] == list(zip(FULL, WEIGHTS, strict=True))
    assert [one.state for one in contexts] == [b'resharded state 2 0', b'resharded state 2 1']
    assert fetcher.local
    assert bool(fetcher.remote) == (rank == 1)  # owner 3 is on node b only


def test_damaged_record_has_a_replica(job: Callable[..., Job], shm: Path, tmp_path: Path) -> None:
    made = job()
    damage((shm / OLD / 'a' / '0' / '0').glob('window-*'))
    window, fetcher = made.window()
    written(window, tmp_path / 'w')
    assert fetcher.remote


def test_record_damaged_everywhere(job: Callable[..., Job], shm: Path, tmp_path: Path) -> None:
    made = job()
    damage(shm.glob(f'{OLD}/*/*/0/window-*'))
    window, _ = made.window()
    with pytest.raises(RefusedWindow, match='slot 0 of rank 0 cannot be read anywhere'):
        written(window, tmp_path / 'w')
    assert obtained(made, shm) is None, 'no reason to stop'


def obtained(
    made: Job,
    shm: Path,
    fail: Callable[[], object] = lambda: None,
    elsewhere: Elsewhere | None = None,
    **given: Any,
) -> Conversion | None:
    """What rank 0 of two goes on from; `fail` is called whenever it begins to write its part."""

    def receive(window: Window, deliver: Callable[[WindowFile], object]) -> WindowFile:
        fail()
        file = windows.begin(window.name, fetched=True)
        assert file is not None
        try:
            deliver(file)
        except BaseException:
            windows.abandon(file)
            raise
        windows.commit(file)
        return file

    store = NodeStore(shm, NEW, 'a')
    windows = OwnerWindows(store, 0, 0, 2**18)
    rank = SimpleNamespace(
        number=0,
        world_size=2,
        config=SparseCheckpointConfig(elastic='restart', **given),
        identity=RankIdentity('new', 'new', 0, placed=placed(0, Layout(2, data=2))),
        exchange=lambda name, own: [own],
        events=SimpleNamespace(emit=lambda event: None),
    )
    memory = SimpleNamespace(
        server=SimpleNamespace(serve_shelf=lambda shelf: None),
        windows=windows,
        receive=receive,
        client=made.client,
    )
    operators = SimpleNamespace(slices={name: slices(name, 0, 2) for name in ('one', 'two')})
    picking: Any = Assembly
    elsewhere = elsewhere or Elsewhere([made.found()], [OLD])
    picker = picking(rank, made.shelves[0], elsewhere, memory, operators, Resharding(), 'history')
    try:
        source: Conversion | None = picker.obtain()
        assert bool(windows.committed()) == (source is not None)
        return source
    finally:
        store.close()


@pytest.mark.parametrize(
    'failure',
    [
        RefusedWindow('a scale for each shard'),
        UnreadableWindow('no answer'),
        HostMemoryError('9 GB'),
        PeerLost('no answer'),
        PeerRefused('not served'),
    ],
    ids=repr,
)
def test_a_whole_window_that_this_start_cannot_take_is_not_given_up(
    failure: Exception, job: Callable[..., Job], shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('moevement_ext.memory.window.name.READ_AGAIN_S', 0.0)

    def fail() -> None:
        raise failure

    made, failures = job(), [PeerLost('no answer')] * 2
    with pytest.raises(UserError, match=rf'{failure}\. Remove that cause.*--sparse-ckpt-forget'):
        obtained(made, shm, fail)
    assert obtained(made, shm, fail, forget=True) is None

    def pass_soon() -> None:
        if failures:
            raise failures.pop()

    assert obtained(made, shm, pass_soon) is not None, 'a lost connection is tried again'


@pytest.mark.parametrize('node', ['a', 'b'])
@pytest.mark.parametrize('passes', [True, False])
def test_copy_that_cannot_be_opened_now_is_not_damaged(
    passes: bool, node: str, job: Callable[..., Job], shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('moevement_ext.memory.window.name.READ_AGAIN_S', 0.0)
    made, really, failures = job(), os.open, iter(range(1 if passes else 10**6))

    def opened(path: Any, *others: Any, **named: Any) -> int:
        place = shm / OLD / node
        if Path(path).is_relative_to(place) and 'window-' in str(path) and next(failures, 9) != 9:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return really(path, *others, **named)

    made.found()
    with monkeypatch.context() as patch:
        elsewhere = Elsewhere([made.found()], [OLD])
        patch.setattr(os, 'open', opened)
        with nullcontext() if passes else pytest.raises(UserError, match='Too many open files'):
            assert obtained(made, shm, elsewhere=elsewhere) is not None


@pytest.mark.parametrize('why', [None, 'its own is here, too', 'another training', 'one layout'])
def test_another_layout_under_another_name_is_noticed(why: str | None, shm: Path) -> None:
    """Else a container with a new name and another number of ranks would start over."""
    leave(shm, {'before': [(0, 0)]} | ({'a': [(1, 1)]} if why == 'its own is here, too' else {}))
    stamp = placed(0) if why != 'another training' else Placed('another', LAYOUT, Seat())
    layouts = directories_of(shm, 'run') if why != 'one layout' else []
    identity = RankIdentity('new', 'new', 0, placed=stamp)
    own = inventory.take_stock(NodeStore(shm, NEW, 'a'), None, identity, layouts=layouts)
    assert own.traces.renamed == ({'before': START} if why is None else {})


def test_only_other_layouts_of_the_run_are_served(job: Callable[..., Job], shm: Path) -> None:
    made = job()
    leave(shm, {'b': [(0, 0)]}, run='other')
    part = made.found().holders[3][0][1]
    assert made.client(1).fetch_part(part)[0].owner == 3
    for foreign in ('other', '../other', NEW):
        with pytest.raises(PeerRefused, match='no other layout of the run'):
            made.client(1).fetch_part(msgspec.structs.replace(part, run=foreign))
    for wrong in ((9, 0, 1), (0, 0, 2**40), (0, 8, 4)):
        with pytest.raises(PeerRefused, match='record'):
            made.client(1).fetch_ranges(part, 0, [wrong], [memoryview(bytearray(1))])


def test_only_a_dead_layout_is_read(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel frees the memory of its processes first, as in the same layout."""
    leave(shm, SPREAD)
    monkeypatch.setattr('moevement_ext.memory.holder_lock.LOCK_S', 0.0)
    live = NodeStore(shm, OLD, 'a')
    live.lock(0)
    with pytest.raises(StoreInUseError, match='a job of another layout'):
        stock(Shelf(NodeStore(shm, NEW, 'a'), None))
    monkeypatch.setattr('moevement_ext.memory.holder_lock._dies', lambda holder: True)
    monkeypatch.setattr('time.sleep', lambda seconds: live.close())
    assert stock(Shelf(NodeStore(shm, NEW, 'a'), None)).seen


def test_removal_deletes_other_layouts_and_keeps_the_own_one(shm: Path) -> None:
    leave(shm, SPREAD)
    leave(shm, {'a': [(0, 0)]}, run=NEW)
    shelf = Shelf(NodeStore(shm, NEW, 'a'), None)
    shelf.remove(shelf.runs())
    assert sorted(path.name for path in shm.iterdir()) == [OLD, NEW]
    assert [path.name for path in (shm / OLD).iterdir()] == ['b']
    Shelf(NodeStore(shm, NEW, 'b'), None).remove([OLD])
    assert [path.name for path in shm.iterdir()] == [NEW]


@pytest.mark.parametrize('joined', [True, False])
def test_a_process_that_joined_late_frees_other_layouts_too(joined: bool, shm: Path) -> None:
    """As the first of its node: the one before it, which had found them, is dead.

    One that has searched at the start frees only what it was allowed to free then.
    """
    leave(shm, {node_name(): [(0, 0)]})
    rank: Any = SimpleNamespace(
        number=1,
        config=SparseCheckpointConfig(dir=str(shm), elastic='restart'),
        run_id=NEW,
        identity=RankIdentity('new', 'new', 1, placed=placed(1)),
    )
    memory: Any = SimpleNamespace(
        server=SimpleNamespace(serve_shelf=lambda shelf: None), first_on_node=lambda: True
    )
    layouts = OtherLayouts(rank)
    layouts._elsewhere = layouts._elsewhere if joined else Elsewhere([], [])
    layouts.keep_until_replaced(memory, None)
    memory.forget_other_layouts()
    assert (shm / OLD).exists() != joined
