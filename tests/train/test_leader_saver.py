"""Who is the vault's client in a run of groups."""

from __future__ import annotations

from typing import Any

import pytest

from bessemer.core.errors import CheckpointError
from bessemer.train import leader_saver
from bessemer.train.leader_saver import LeaderSaver


class _Client:
    """A vault's client that can be told to have lost its vault, or to have been replaced."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.dropped: list[int] = []
        self.closed = self.no_memory = False
        self.error = ""  # from now on
        self.errors: list[str] = []  # each once
        self.step: int | None = None  # the errors are about

    def reserve(self, slices: Any, meta: Any) -> None:
        if self.no_memory:
            raise CheckpointError("gone", code="vault-lost")

    def save(self, step: int, slices: Any, meta: Any) -> float:
        self._check()
        self.saved.append(step)
        return 0.5

    def hold(self, step: int, slices: Any, meta: Any) -> float:
        self._check()
        return 0.25

    def poll(self) -> list[dict[str, Any]]:
        self._check()
        return [{"step": step} for step in self.saved]

    def wait(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        return self.poll()

    def close(self) -> None:
        self.closed = True

    def _check(self) -> None:
        if self.error or self.errors:
            raise CheckpointError("gone", code=self.error or self.errors.pop(), step=self.step)


def _saver() -> tuple[LeaderSaver, list[_Client]]:
    made: list[_Client] = []

    def connect(patience_s: float) -> Any:
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


def test_a_last_save_that_failed_at_once_is_no_success() -> None:
    """The loop polls right behind it, and hears of the failure there already."""
    saver, made = _saver()
    saver.save(4, [], {})
    made[0].errors, made[0].step = ["disk-full"], 4
    assert saver.poll() == []
    with pytest.raises(CheckpointError) as caught:
        saver.wait()
    assert caught.value.code == "disk-full"
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


def test_without_a_vault_a_copy_is_left_out_and_a_save_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither may hold up the groups: a copy waits for no vault at all, a save for a while."""
    waited: list[float] = []
    told: list[int | None] = []
    there: list[_Client] = []

    def connect(patience_s: float) -> Any:
        waited.append(patience_s)
        if not there:
            raise CheckpointError("no vault answers", code="vault-lost")
        return there[-1]

    saver = LeaderSaver(connect)
    saver.tell = lambda error: told.append(error.step)
    assert saver.hold(3, [], {}) < 1.0 and waited == [0.0] and not told
    assert saver.save(4, [], {}) < 1.0 and 0 < waited[1] < 10.0 and told == [4]
    monkeypatch.setattr(leader_saver, "_LAST_PATIENCE_S", 0.3)
    with pytest.raises(CheckpointError) as caught:
        saver.wait()
    assert caught.value.code == "vault-lost"
    there.append(_Client())
    assert saver.save(8, [], {}) == 0.5 and saver.wait() == [{"step": 8}]
    there[-1].error = "vault-lost"
    there.append(_Client())
    assert saver.hold(9, [], {}) == 0.25 and there[0].closed


def test_a_vault_that_dies_while_its_memory_is_reserved_is_let_go() -> None:
    saver, made = _saver()
    saver.save(4, [], {})
    made[0].error = "vault-lost"
    made.clear()

    def dying(patience_s: float) -> Any:
        made.append(_Client())
        made[-1].no_memory = True
        return made[-1]

    saver._connect = dying
    saver.save(8, [], {})
    assert made[0].closed and saver._client is None


@pytest.mark.parametrize("heard_by", ["poll", "wait"])
@pytest.mark.parametrize("code", ["vault-lost", "checkpoint-dropped"])
def test_a_last_save_whose_vault_died_is_made_with_the_next_one(code: str, heard_by: str) -> None:
    """The state stands still, so that it's the same save."""
    saver, made = _saver()
    saver.save(4, [], {})
    made[0].errors, made[0].step = [code], 4
    if heard_by == "poll" and code == "checkpoint-dropped":
        made[0].errors, made[0].dropped = [], [4]
    if heard_by == "poll":
        saver.poll()
    assert saver.wait() == [{"step": 4}]
    assert [client.saved for client in made] == [[4], [4]] and made[0].closed


def test_a_last_save_for_which_no_other_vault_comes_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_saver, "_LAST_PATIENCE_S", 0.5)
    saver, made = _saver()
    waited: list[float] = []
    saver.save(4, [], {})
    made[0].error = "vault-lost"

    def none(patience_s: float) -> Any:
        waited.append(patience_s)
        raise CheckpointError("no vault answers", code="vault-lost")

    saver._connect = none
    with pytest.raises(CheckpointError, match="no vault answers"):
        saver.wait()
    assert 0.4 < waited[0] <= 0.5 and len(waited) > 1 and waited[-1] < 0.4


def test_a_group_that_led_once_saves_nothing_at_the_end() -> None:
    """What it would save again is another step's state by then."""
    saver, made = _saver()
    saver.save(4, [], {})
    made[0].errors = ["vault-lost"]
    assert saver.poll() == [] and made[0].closed
    saver.leads = lambda: False
    assert saver.poll() == [] and saver.wait() == [] and len(made) == 1


def test_a_save_that_another_rank_left_out_is_told_and_made_good_by_the_last() -> None:
    saver, made = _saver()
    saver.save(4, [], {})
    saver.save(8, [], {})
    told: list[tuple[str, int | None]] = []
    saver.tell = lambda error: told.append((error.code, error.step))
    made[0].errors, made[0].step = ["checkpoint-dropped"], 4
    assert saver.wait()[-1] == {"step": 8}
    made[0].dropped = [4]
    saver.poll()
    assert told == [("checkpoint-dropped", 4)] * 2 and saver.wait()[-1] == {"step": 8}
    assert len(made) == 1
