"""Reducing a few numbers in O(log N) rounds."""

from __future__ import annotations

import pytest

from lightning_bucketddp.comm import small_reduce
from lightning_bucketddp.comm.collectives import files_of_collectives
from lightning_bucketddp.comm.small_reduce import Round, rounds_of
from tests.support.jobs.exchanging import names_of_threads, reduce_and_gather
from tests.support.ranks import run_on_ranks


def log2_rounded_up(number: int) -> int:
    return (number - 1).bit_length()


@pytest.mark.parametrize("world_size", [*range(1, 71), 1024])
@pytest.mark.sampled(20)
def test_every_rank_hears_of_every_other_once_in_log_n_rounds(world_size: int) -> None:
    rounds = [rounds_of(rank, world_size) for rank in range(world_size)]
    is_power = world_size & (world_size - 1) == 0
    at_most = log2_rounded_up(world_size) if is_power else log2_rounded_up(world_size) + 1
    assert max(map(len, rounds)) == at_most

    # Each rank takes its rounds in order; a message is there when both partners have come to it.
    heard = [1 << rank for rank in range(world_size)]  # a bit for each rank
    done = [0] * world_size
    ready = list(range(world_size))
    while ready:
        rank = ready.pop()
        if done[rank] == len(rounds[rank]):
            continue
        mine = rounds[rank][done[rank]]
        other = mine.partner
        if done[other] == len(rounds[other]) or rounds[other][done[other]].partner != rank:
            continue  # the other one looks again when it has come here
        theirs: Round = rounds[other][done[other]]
        assert (mine.sends, mine.receives) == (theirs.receives, theirs.sends)
        before = heard[rank], heard[other]
        heard[rank] = _received(mine, own=before[0], received=before[1])
        heard[other] = _received(theirs, own=before[1], received=before[0])
        for one in (rank, other):
            done[one] += 1
            ready.append(one)
    assert done == [len(one) for one in rounds]
    assert heard == [(1 << world_size) - 1] * world_size


def _received(this: Round, *, own: int, received: int) -> int:
    if not this.receives or this.gets_result:
        return received if this.receives else own
    assert own & received == 0  # nothing is added twice
    return own | received


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_numbers_are_reduced_to_what_a_plain_gather_gives(world_size: int) -> None:
    for rank, (reduced, gathered, num_sent) in enumerate(run_on_ranks(reduce_and_gather, world_size=world_size)):
        for step, (one, by_rank) in enumerate(zip(reduced, gathered, strict=True)):
            fields = list(zip(*by_rank, strict=True))
            assert one.total == [sum(field) for field in fields]
            assert one.least == [min(field) for field in fields]
            assert one.greatest == [max(field) for field in fields]
            assert one.by_rank == (by_rank if step == 3 else [])
        # One message in each round, and once more for the numbers of all ranks.
        assert num_sent == 5 * sum(this.sends for this in rounds_of(rank, world_size))


def test_its_thread_ends_with_it() -> None:
    run_on_ranks(reduce_and_gather, world_size=3)
    assert all("bucketddp-reduce" not in names for names in run_on_ranks(names_of_threads, world_size=3))


def test_a_rank_that_waits_for_numbers_is_known_to_wait() -> None:
    assert small_reduce.__file__ in files_of_collectives()
