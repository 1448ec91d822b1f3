import itertools
import math

import pytest

from bessemer.core.job import TrainSection
from bessemer.train.schedule import lr_factor


def factors(**fields: object) -> list[float]:
    train = TrainSection.model_validate({"steps": 100, "warmup_steps": 10, "min_lr_ratio": 0.1} | fields)
    return [lr_factor(train, step) for step in range(train.steps)]


def test_warm_up_is_linear_and_already_moves_in_the_first_step() -> None:
    assert factors()[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_last_step_reaches_the_minimum_and_nothing_rises_after_warm_up(schedule: str) -> None:
    values = factors(lr_schedule=schedule)
    assert values[-1] == pytest.approx(0.1)
    assert all(b <= a for a, b in itertools.pairwise(values[10:]))


def test_cosine_is_half_way_in_the_middle() -> None:
    train = TrainSection(steps=101, warmup_steps=0, min_lr_ratio=0.0)
    assert lr_factor(train, 50) == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))


def test_wsd_stays_at_the_top_until_its_decay() -> None:
    values = factors(lr_schedule="wsd", decay_fraction=0.3)
    assert values[10:69] == [1.0] * 59
    assert values[70] < 1.0


def test_constant_stays() -> None:
    assert factors(lr_schedule="constant")[10:] == [1.0] * 90


def test_a_run_shorter_than_its_warm_up_never_passes_the_peak() -> None:
    assert max(factors(steps=5, warmup_steps=10)) == 0.5


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (30, 3), (100, 10), (5000, 10)])
def test_the_default_warm_up_follows_the_length_of_the_run(steps: int, warmup: int) -> None:
    values = factors(steps=steps, warmup_steps=None)
    assert TrainSection(steps=steps).warmup == warmup
    assert max(values) == 1.0 and values.index(1.0) == max(0, warmup - 1)
    assert values == factors(steps=steps, warmup_steps=warmup)
