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
        self.error = ""  # from now on
        self.errors: list[str] = []  # each once
        self.step: int | None = None  # the errors are about

    def reserve(self, slices: Any, meta: Any) -> None: ...

    def save(self, step: int, slices: Any, meta: Any) -> float:
        self._check()
        self.saved.append(step)
        return 0.5

    def poll(self) -> list[dict[str, Any]]:
        self._check()
        return [{"step": step} for step in self.saved]

    def wait(self) -> list[dict[str, Any]]:
        return self.poll()

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.error or self.errors:
            raise CheckpointError("gone", code=self.error or self.errors.pop(), step=self.step)


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


@pytest.mark.parametrize("code", ["disk-full", "vault-lost"])
def test_a_last_save_that_failed_at_once_is_no_success(code: str) -> None:
    """The loop polls right behind it, and hears of the failure there already."""
    saver, made = _saver()
    saver.save(4, [], {})
    made[0].errors, made[0].step = [code], 4
    assert saver.poll() == []
    with pytest.raises(CheckpointError) as caught:
        saver.wait()
    assert caught.value.code == code
    saver.save(8, [], {})
    assert saver.wait()[-1] == {"step": 8}


def test_an_earlier_save_that_failed_is_made_good_by_the_last() -> None:
    saver, made = _saver()
    saver.save(4, [], {})
    saver.save(8, [], {})
    told: list[str] = []
    saver.tell = lambda error: told.append(error.code)
    for heard_by in (saver.poll, saver.wait):
        made[0].errors, made[0].step = ["disk-full"], 4
        heard_by()
    assert told == ["disk-full"] * 2 and saver.wait()[-1] == {"step": 8}


@pytest.mark.parametrize("code", ["disk-full", "checkpoint-write"])
def test_a_save_that_the_disk_refuses_is_told_and_the_next_one_tried(code: str) -> None:
    saver, made = _saver()
    told: list[str] = []
    saver.tell = lambda error: told.append(error.code)
    saver.save(4, [], {})
    made[0].errors = [code]
    assert saver.poll() == [] and told == [code]
    made[0].errors = [code]
    saver.save(8, [], {})
    assert told == [code, code] and made[0].saved == [4, 8] and not made[0].closed


def test_the_last_save_has_to_succeed() -> None:
    saver, made = _saver()
    saver.save(4, [], {})
    made[0].errors = ["disk-full"]
    with pytest.raises(CheckpointError, match="gone"):
        saver.wait()


def test_other_errors_of_a_save_stop_the_run() -> None:
    saver, made = _saver()
    saver.save(4, [], {})
    made[0].error = "checkpoint-coverage"
    with pytest.raises(CheckpointError, match="gone"):
        saver.poll()
