# SPDX-License-Identifier: Apache-2.0
"""Ways to break the conversion of a state into another layout, one step each."""

import msgspec

from megatron.moevement.job import megatron_trainer as resharding
from megatron.moevement.state import resharded_state
from megatron.moevement.state.resharded_tensors import ExpertDivision
from moevement_ext.recover.reshard import index
from moevement_ext.replicate import replica_server


def an_expert_is_swapped() -> None:
    """Experts 0 and 1 change places on the way."""
    original = resharding.canonical_name
    swapped = {'0': '1', '1': '0'}

    def canonical_name(operator: str, tensor: str, shared: bool) -> str:
        name = original(operator, tensor, shared)
        place, _, expert = operator.rpartition('.expert')
        if not place or expert not in swapped or _on_the_other_side():
            return name
        return name.replace(f'local_experts.{expert}.', f'local_experts.{swapped[expert]}.')

    resharding.canonical_name = canonical_name


def _on_the_other_side() -> bool:
    """Names of owners' records are asked for by the index, own names are not."""
    import inspect

    return any(frame.function == '_name_of' for frame in inspect.stack()[:6])


def ranges_are_shifted_by_one() -> None:
    """Where a range is put together of several, one comes to one element before its place."""
    original = index._piece

    def shifted(held: index._Held, start: int, end: int, need: index.Wanted) -> index.Portion:
        piece = original(held, start, end, need)
        return piece._replace(at=piece.at - held.size) if piece.at else piece

    index._piece = shifted


def data_go_on_where_so_many_ranks_would_be() -> None:
    """Samples are counted as if the ranks of before had consumed them."""
    original = resharded_state.resharded

    def resharded(*args: object) -> object:
        state = original(*args)
        return msgspec.structs.replace(
            state, consumed_train_samples=state.consumed_train_samples // 2
        )

    resharding.resharded = resharded


def streams_are_those_of_another_rank() -> None:
    """Random numbers go on from an owner of another expert shard."""
    original = resharded_state.streams_of

    def streams_of(own, seats, each_data_rank):
        found = original(own, seats, each_data_rank)
        other = max(seats)
        return found._replace(experts=other)

    resharding.streams_of = streams_of


def moments_are_mixed_up() -> None:
    """Adam's first moments are taken from where the second ones are."""
    original = index.SlotIndex.pieces

    def pieces(self, need, distance):
        if need.part == 'exp_avg':
            need = need._replace(part='exp_avg_sq')
        return original(self, need, distance)

    index.SlotIndex.pieces = pieces


def experts_are_cut_elsewhere() -> None:
    """A shard of an expert gets the elements of the next shard."""
    original = ExpertDivision.of

    def of(self, operator, part, tensor, shards, shard):
        return original(self, operator, part, tensor, shards, (shard + 1) % shards)

    ExpertDivision.of = of


def records_of_another_owner_are_served() -> None:
    """Sizes are the same, and so is the checksum of what is sent."""
    original = replica_server._send_ranges

    def send_ranges(connection, shelf, request, timeout_s):
        part = msgspec.structs.replace(request.part, owner=request.part.owner ^ 1)
        request = msgspec.structs.replace(request, part=part)
        original(connection, shelf, request, timeout_s)

    replica_server._send_ranges = send_ranges
