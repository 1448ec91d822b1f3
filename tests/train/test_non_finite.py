"""A NaN or an infinity stops the run before the update, on all ranks, and names rank, step and the first bad tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from train.toy import run_steps, toy_job, toy_parts

from bessemer.core.errors import NonFinite
from bessemer.core.job import Job
from bessemer.train.optim import local


def step_with_a_fault(rank: int, world: int, job: Job, guilty: int, fault: str) -> dict[str, Any]:
    """Two clean steps, then one with `fault` on rank `guilty`: what was raised, and whether anything was updated."""
    parts = toy_parts(job, rank)
    list(run_steps(parts, 0, 2))
    before = {n: local(p.detach()).clone() for n, p in parts.optimizer.params.items()}
    if rank == guilty:
        if fault == "parameter":
            with torch.no_grad():
                local(parts.optimizer.params["blocks.1.mlp.down.weight"])[0, 0] = float("nan")
        elif fault == "activation":
            parts.module.block(1).register_forward_hook(lambda module, args, output: output * float("inf"))
        elif fault == "gradient":
            parts.optimizer.params["blocks.0.attn.o.weight"].register_hook(lambda grad: grad * float("nan"))
    try:
        list(run_steps(parts, 2, 3))
    except NonFinite as error:
        changed = [n for n, p in parts.optimizer.params.items() if not torch.equal(local(p.detach()), before[n])]
        return {"rank": error.rank, "step": error.step, "text": error.message, "changed": changed}
    return {"rank": None, "step": None, "text": "nothing was raised", "changed": []}


@pytest.mark.parametrize(
    ("layout", "fault", "named"),
    [
        ({"dp": 2}, "parameter", "parameter blocks.1.mlp.down.weight"),
        ({"dp": 2}, "activation", "output of blocks.1"),
        ({"dp": 2}, "gradient", "gradient of blocks.0.attn.o.weight"),
        ({"dp": 2, "dp_shard": "full"}, "parameter", "parameter blocks.1.mlp.down.weight"),
        ({"dp": 2, "dp_shard": "full"}, "activation", "output of blocks.1"),
        ({"tp": 2}, "parameter", "parameter blocks.1.mlp.down.weight"),
        ({"tp": 2, "sequence_parallel": True}, "activation", "output of blocks.1"),
        ({"cp": 2}, "activation", "output of blocks.1"),
        ({"cp": 2}, "gradient", "gradient of blocks.0.attn.o.weight"),
    ],
)
@pytest.mark.parametrize("guilty", [0, 1])
def test_the_guilty_rank_and_its_first_bad_tensor_are_named_everywhere(
    layout: dict[str, Any], fault: str, named: str, guilty: int
) -> None:
    job = toy_job(layout=layout, train={"global_batch": 8})
    for rank, found in enumerate(run_ranks(2, step_with_a_fault, job, guilty, fault)):
        assert named in found["text"], found
        assert (found["rank"], found["step"]) == (guilty, 3)
        expected = ["blocks.1.mlp.down.weight"] if fault == "parameter" and rank == guilty else []
        assert found["changed"] == expected, "something was updated"


V, INTERLEAVED = {"schedule": "zb-v"}, {"virtual_stages": 2}


@pytest.mark.parametrize(
    ("layers", "schedule", "fault", "named", "guilty"),
    [
        (2, {}, "parameter", "parameter blocks.1.mlp.down.weight", 1),
        (2, {}, "activation", "output of blocks.1", 1),
        (2, {}, "gradient", "gradient of blocks.0.attn.o.weight", 0),
        (4, V, "activation", "output of blocks.1", 1),  # the last stage, which has it by then, is rank 0's
        (4, INTERLEAVED, "activation", "output of blocks.1", 1),
    ],
)
def test_the_guilty_stage_of_a_pipeline_is_named_everywhere(
    layers: int, schedule: dict[str, Any], fault: str, named: str, guilty: int
) -> None:
    model = {"num_hidden_layers": layers}
    job = toy_job(model=model, layout={"pp": 2, **schedule}, train={"global_batch": 8})
    for found in run_ranks(2, step_with_a_fault, job, guilty, fault):
        assert named in found["text"], found
        assert (found["rank"], found["step"]) == (guilty, 3)


def test_no_counted_token_at_all_is_said() -> None:
    job = toy_job()
    parts = toy_parts(job)
    from train import toy

    batches = [toy.toy_batch([i]) for i in range(4)]
    for batch in batches:
        batch["weights_BS"].zero_()
    with pytest.raises(NonFinite, match="no token"):
        parts.step.run(0, iter(batches), len(batches))
