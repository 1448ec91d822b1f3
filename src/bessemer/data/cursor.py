"""The global cursor: which sample ids a step takes, how they are cut into units, and who takes which unit.

Step s takes the ids [job.samples_before(s), + job.global_batch_at(s)). They are cut into units of `job.unit` ids, whose
content depends on the job alone; units are dealt from (step, number of members). So whatever the ranks, workers or
accumulation, a step sees the same samples.
"""

from __future__ import annotations

from bessemer.core.job import Job

__all__ = ["deal", "units_of_step"]


def units_of_step(job: Job, step: int) -> list[range]:
    """The sample ids of step `step` (from 0), cut into units in ascending order.

    The last one is shorter where `job.unit` doesn't divide the batch; `bessemer check` refuses such a job.
    """
    first = job.samples_before(step)
    end = first + job.global_batch_at(step)
    return [range(at, min(at + job.unit, end)) for at in range(first, end, job.unit)]


def deal(step: int, num_units: int, members: int) -> list[list[int]]:
    """For each of `members` the indices of its units: ascending, every unit once, counts differing by at most one.

    The members that take one more than others move on by one with each step.
    """
    if members < 1:
        raise ValueError(f"units can't be dealt to {members} members")
    each, extra = divmod(num_units, members)
    dealt, at = [], 0
    for member in range(members):
        count = each + ((member - step) % members < extra)
        dealt.append(list(range(at, at + count)))
        at += count
    return dealt
