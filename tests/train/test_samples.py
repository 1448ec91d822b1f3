"""Which samples a step takes doesn't depend on ranks, sharding, micro-batches or reading threads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bessemer.core.job import Job
from bessemer.train.step import rank_micro_batches


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job whose batches fit its layout, with a ramp."""
    replicas = draw(st.integers(1, 4))
    shard = draw(st.integers(1, 3))
    micro = draw(st.integers(1, 3))
    unit = micro * shard * draw(st.integers(1, 2))
    units = draw(st.integers(replicas, 3 * replicas))
    ramp = draw(st.lists(st.integers(replicas, 3 * replicas), max_size=2))
    return Job.model_validate(
        {
            "layout": {"dp": replicas * shard, "dp_shard": "full" if shard > 1 else "none"},
            "train": {
                "global_batch": unit * units,
                "micro_batch": micro,
                "batch_ramp": [((i + 1) * 3, unit * u) for i, u in enumerate(ramp)],
            },
            "keep": {"unit": unit, "replicas": replicas},
        }
    )


@given(jobs(), st.integers(0, 12))
def test_the_ranks_of_a_step_take_each_of_its_samples_once(job: Job, step: int) -> None:
    taken: list[int] = []
    for replica in range(job.replicas):
        counts = set()
        for shard_index in range(job.shard):
            batches = rank_micro_batches(job, step, replica, shard_index)
            assert all(len(ids) == job.train.micro_batch for ids in batches)
            counts.add(len(batches))
            taken += [i for ids in batches for i in ids]
        assert len(counts) == 1, "ranks that share a model must run in lockstep"
    first = job.samples_before(step)
    assert sorted(taken) == list(range(first, first + job.global_batch_at(step)))
    assert job.samples_before(step + 1) == first + job.global_batch_at(step)
