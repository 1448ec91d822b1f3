"""Hashes of parameters: a flipped bit shows, and the copies of a run compare what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from train.toy import toy_job, toy_parts

from bessemer.train.alike import hashes_of_copies, parameters_hash


def test_one_flipped_bit_changes_the_hash() -> None:
    torch.manual_seed(0)
    params = [torch.randn(7, 5), torch.randn(3).bfloat16(), torch.zeros(2, dtype=torch.float64)]
    before = parameters_hash(params)
    assert parameters_hash([p.clone() for p in params]) == before
    for param, words in zip(params, (torch.int32, torch.int16, torch.int64), strict=True):
        for bit in (0, 9):
            param.view(words).view(-1)[1] ^= 1 << bit
            assert parameters_hash(params) != before
            param.view(words).view(-1)[1] ^= 1 << bit
    assert parameters_hash(params) == before


def test_two_parameters_that_are_exchanged_change_the_hash() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert parameters_hash([one, other]) != parameters_hash([other, one])


def compare(rank: int, world: int) -> Any:
    parts = toy_parts(toy_job(layout={"dp": world}), rank)
    params = list(parts.optimizer.params.values())
    same = hashes_of_copies(parameters_hash(params), parts.mesh)
    if rank == 1:
        params[3].data.view(torch.int32).view(-1)[2] ^= 1 << 20
    return same, hashes_of_copies(parameters_hash(params), parts.mesh)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_copies_compare_what_they_hold() -> None:
    for same, after in run_ranks(3, compare, timeout_s=200.0):
        assert same[0] == [0, 1, 2] and len(set(same[1])) == 1
        assert after[1][0] == after[1][2] == same[1][0] and after[1][1] != same[1][1]
