"""The cross-entropy of a head whose rows are shared out, against the one of a whole head: ranks are threads here."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from bessemer import ops
from bessemer.ops.cross_entropy import VocabularyShare

TOKENS, WIDTH = 61, 24
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # of the largest element of a gradient
LOSS_LIMIT = {torch.float32: 1e-6, torch.bfloat16: 2e-3}  # relative


class Meeting:
    """Gathers values among the threads of one call, and counts how often."""

    def __init__(self, ranks: int) -> None:
        self.there: list[Tensor] = [torch.empty(0)] * ranks
        self.barrier = threading.Barrier(ranks, self._met, timeout=20)
        self.met = 0

    def _met(self) -> None:
        self.met += 1

    def gather(self, rank: int, values: Tensor) -> Tensor:
        self.there[rank] = values.clone()
        self.barrier.wait()
        found = torch.stack(self.there)
        self.barrier.wait()
        return found

    @property
    def times(self) -> int:
        return self.met // 2


def case(vocabulary: int, dtype: torch.dtype, scale: float = 1.0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(vocabulary)
    weights = torch.rand(TOKENS, generator=made)
    labels = torch.randint(0, vocabulary, (TOKENS,), generator=made)
    weights[::5], labels[::5] = 0, 10**6
    return {
        "hidden": torch.randn(TOKENS, WIDTH, generator=made).to(dtype),
        "weight": torch.randn(vocabulary, WIDTH, generator=made) * scale,
        "labels": labels,
        "weights": weights,
    }


def one_rank(given: dict[str, Tensor], ranks: int, meeting: Meeting, rank: int) -> dict[str, Any]:
    """A rank's loss and gradients; its padding is NaN, which would show up wherever it is read."""
    vocabulary = len(given["weight"])
    rows = -(-vocabulary // ranks)
    weight = torch.full((rows, WIDTH), torch.nan)
    mine = given["weight"][rank * rows : (rank + 1) * rows]
    weight[: len(mine)] = mine
    weight.requires_grad_()
    hidden = given["hidden"].clone().requires_grad_()
    share = VocabularyShare(vocabulary, rank * rows, rows, partial(meeting.gather, rank))
    loss = ops.linear_cross_entropy(hidden, weight, given["labels"], given["weights"], share)
    (loss / 7).backward()
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad, "valid": len(mine)}


def all_ranks(given: dict[str, Tensor], ranks: int, meeting: Meeting) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(partial(one_rank, given, ranks, meeting), range(ranks)))


def whole(given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = given["hidden"].clone().requires_grad_(), given["weight"].clone().requires_grad_()
    loss = ops.linear_cross_entropy(hidden, weight, given["labels"], given["weights"])
    (loss / 7).backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocabulary", "ranks"),
    [(96, 4), (93, 4), (93, 2), (5, 4)],
    ids=["even", "padded", "two ranks", "a rank of padding only"],
)
def test_equals_the_loss_of_a_whole_head(vocabulary, ranks, dtype):
    given = case(vocabulary, dtype)
    loss, dh, dw = whole(given)
    meeting = Meeting(ranks)
    found = all_ranks(given, ranks, meeting)
    assert meeting.times == 1
    assert all(torch.equal(f["loss"], found[0]["loss"]) for f in found)
    torch.testing.assert_close(found[0]["loss"], loss, rtol=LOSS_LIMIT[dtype], atol=0)
    summed = torch.stack([f["hidden"].float() for f in found]).sum(0)
    assert (summed - dh.float()).abs().max() <= LIMIT[dtype] * dh.abs().max()
    assert all((f["hidden"][::5] == 0).all() for f in found)
    assert all((f["weight"][f["valid"] :] == 0).all() for f in found)
    rows = torch.cat([f["weight"][: f["valid"]] for f in found])
    assert rows.shape == dw.shape and (rows - dw).abs().max() <= LIMIT[dtype] * dw.abs().max()


def test_ranks_meet_once_a_chunk_and_all_cut_alike(monkeypatch):
    """The last rank has fewer rows that count, but no other number of chunks."""
    monkeypatch.setattr("bessemer.ops.cross_entropy._CHUNK_BYTES", 10 * 24 * 4)
    given = case(93, torch.float32)
    loss, dh, dw = whole(given)
    meeting = Meeting(4)
    found = all_ranks(given, 4, meeting)
    assert meeting.times == 7  # 61 tokens in tens
    torch.testing.assert_close(found[2]["loss"], loss, rtol=1e-6, atol=0)
    assert (torch.stack([f["hidden"] for f in found]).sum(0) - dh).abs().max() <= 2e-6 * dh.abs().max()
    rows = torch.cat([f["weight"][: f["valid"]] for f in found])
    assert (rows - dw).abs().max() <= 2e-6 * dw.abs().max()


def test_large_logits_neither_overflow_nor_cost_digits():
    """Logits of hundreds, of which exp overflows: the largest over all ranks is taken off before."""
    given = case(93, torch.float32, scale=100.0)
    found = all_ranks(given, 4, Meeting(4))
    logits = given["hidden"].double() @ given["weight"].double().t()
    assert logits.abs().max() > 1000
    labels = torch.where(given["weights"] == 0, 0, given["labels"])
    exact = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * given["weights"]).sum()
    torch.testing.assert_close(found[0]["loss"].double(), exact, rtol=1e-6, atol=0)


def test_without_gradients_none_are_made():
    given = case(93, torch.float32)
    before = given["hidden"].clone()
    share = VocabularyShare(93, 0, 93, lambda values: values[None])
    with torch.no_grad():
        loss = ops.linear_cross_entropy(given["hidden"], given["weight"], given["labels"], given["weights"], share)
    assert not loss.requires_grad and torch.equal(given["hidden"], before)
    torch.testing.assert_close(loss, whole(given)[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("label", [-1, 93, 95])
def test_a_label_that_is_nowhere_is_refused_by_every_rank(label):
    """93 and 95 are padding of the last of four ranks, which holds rows 72 to 95."""
    given = case(93, torch.float32)
    given["labels"][3] = label
    for rank in range(4):
        with pytest.raises(IndexError, match=rf"label {label} outside of the vocabulary \[0, 93\)"):
            one_rank(given, 4, Meeting(4), rank)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_logits_come_through(bad):
    given = case(93, torch.float32)
    given["hidden"][1, 3] = bad
    assert not any(f["loss"].isfinite() for f in all_ranks(given, 2, Meeting(2)))
