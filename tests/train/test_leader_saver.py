"""Who is the vault's client in a run of groups."""

from __future__ import annotations

from typing import Any

import pytest

from bessemer.core.errors import CheckpointError
from bessemer.train.elastic_worker import LeaderSaver


class _Client:
    """A vault's client that can be told to have lost its vault, or to have been replaced."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.closed = False
        self.error = ""

    def reserve(self, slices: Any, meta: Any) -> None: ...

    def save(self, step: int, slices: Any, meta: Any) -> float:
        self._check()
        self.saved.append(step)
        return 0.5

    def poll(self) -> list[dict[str, Any]]:
        self._check()
        return [{"step": step} for step in self.saved]

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.error:
            raise CheckpointError("gone", code=self.error)


def _saver() -> tuple[LeaderSaver, list[_Client]]:
    made: list[_Client] = []

    def connect() -> Any:
        made.append(_Client())
        return made[-1]

    return LeaderSaver(connect), made


def test_it_connects_with_the_first_save() -> None:
    saver, made = _saver()
    saver.reserve([], {})
    assert saver.poll() == [] and not made
    assert saver.save(4, [], {}) == 0.5 and made[0].saved == [4]
    assert saver.poll() == [{"step": 4}]


def test_a_group_that_leads_no_longer_lets_go_before_the_vault_refuses_it() -> None:
    saver, made = _saver()
    saver.save(4, [], {})
    made[0].error = "vault-protocol"  # the next leader has taken its place
    saver.leads = lambda: False
    assert saver.poll() == [] and made[0].closed


def test_after_the_death_of_a_vault_the_next_save_goes_to_another() -> None:
    saver, made = _saver()
    saver.save(4, [], {})
    made[0].error = "vault-lost"
    assert saver.poll() == [] and made[0].closed
    saver.save(8, [], {})
    made[1].error = "vault-lost"
    saver.save(12, [], {})
    assert [client.saved for client in made] == [[4], [8], [12]]


def test_other_errors_of_a_save_stop_the_run() -> None:
    saver, made = _saver()
    saver.save(4, [], {})
    made[0].error = "disk-full"
    with pytest.raises(CheckpointError, match="gone"):
        saver.poll()
