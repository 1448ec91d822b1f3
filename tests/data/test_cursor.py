import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.core.job import Job
from bessemer.data import deal, units_of_step


def job_of(micro: int, accumulation: int, dp: int, **train: object) -> Job:
    fields = {"micro_batch": micro, "global_batch": micro * accumulation * dp, **train}
    return Job.model_validate({"layout": {"dp": dp}, "train": fields})


@settings(max_examples=100, deadline=None)
@given(step=st.integers(0, 10**6), units=st.integers(0, 200), members=st.integers(1, 40))
def test_every_unit_is_dealt_once_and_evenly(step: int, units: int, members: int) -> None:
    dealt = deal(step, units, members)
    assert sorted(i for own in dealt for i in own) == list(range(units))
    sizes = [len(own) for own in dealt]
    assert len(sizes) == members and max(sizes) - min(sizes) <= 1
    assert dealt == deal(step, units, members)


def test_the_larger_shares_go_round() -> None:
    extra = [[len(own) for own in deal(step, 5, 4)].index(2) for step in range(8)]
    assert extra == [0, 1, 2, 3, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="members"):
        deal(0, 1, 0)


@settings(max_examples=60, deadline=None)
@given(batch=st.sampled_from([8, 16, 24, 48]), step=st.integers(0, 500), ramp=st.booleans())
def test_a_step_takes_the_same_samples_whatever_the_spread(batch: int, step: int, ramp: bool) -> None:
    """Over dp, accumulation, micro-batch and sharding: the ids of the step, and their order within each unit."""
    seen = set()
    for dp in (1, 2, 4):
        for micro in (1, 2):
            for dp_shard in ("none", "full"):
                job = Job.model_validate(
                    {
                        "layout": {"dp": dp, "dp_shard": dp_shard},
                        "train": {
                            "global_batch": batch,
                            "micro_batch": micro,
                            "batch_ramp": [(100, 8)] if ramp else [],
                        },
                    }
                )
                units = units_of_step(job, step)
                dealt = deal(step, len(units), job.replicas)
                ids = sorted(i for own in dealt for u in own for i in units[u])
                seen.add(tuple(ids))
    assert len(seen) == 1
    (ids,) = seen
    assert list(ids) == list(range(ids[0], ids[0] + len(ids)))


def test_steps_follow_each_other_through_a_ramp() -> None:
    job = job_of(2, 3, 1, batch_ramp=[(2, 2), (4, 4)])
    steps = [units_of_step(job, step) for step in range(6)]
    assert [len(units) for units in steps] == [1, 1, 2, 2, 3, 3]
    assert [i for units in steps for unit in units for i in unit] == list(range(2 + 2 + 4 + 4 + 6 + 6))


def test_units_do_not_depend_on_members() -> None:
    job = job_of(2, 4, 1)
    assert units_of_step(job, 1) == [range(8, 10), range(10, 12), range(12, 14), range(14, 16)]
