"""The decoder under FSDP2, block by block: the same gradients as whole, with and without its mixed precision."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from bessemer.core.model import ModelSpec
from bessemer.models.build import build

SPEC = ModelSpec(
    family="llama",
    vocab_size=53,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=40,
    max_positions=32,
    tied_embeddings=True,
    qk_norm=True,
)


def whole_and_sharded(rank, world, precision):
    """The largest relative difference of any parameter's gradient, and the types of the sharded gradients."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    ids = torch.randint(0, 53, (2, 17), generator=torch.Generator().manual_seed(1))
    segments = torch.tensor([[0] * 9 + [1] * 7] * 2)
    inputs = (ids[:, :-1], ids[:, 1:])
    whole, sharded = build(SPEC, seed=2), build(SPEC, seed=2)
    whole.compute_dtype = sharded.compute_dtype = torch.float32 if precision == "plain" else torch.bfloat16
    policy = MixedPrecisionPolicy()
    if precision == "fsdp-bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in sharded.blocks.values():
        fully_shard(block, mp_policy=policy, reshard_after_forward=True)
    fully_shard(sharded, mp_policy=policy)
    for model in (whole, sharded):
        for _ in range(2):  # gradients accumulate
            model(*inputs, segments_BS=segments)[0].backward()
    worst, types = 0.0, set()
    for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
        full = q.grad.full_tensor()  # the mean over ranks of equal gradients
        types.add(full.dtype)
        worst = max(worst, ((full - p.grad).abs().max() / p.grad.abs().max()).item())
    dist.barrier()
    return worst, types


# FSDP's own bf16 also rounds norms, embedding and the residual stream, so there only a wrong scale or a missing
# gradient is told from rounding.
@pytest.mark.parametrize(("precision", "limit"), [("plain", 1e-5), ("compute-bf16", 1e-5), ("fsdp-bf16", 5e-2)])
def test_sharded_gradients_equal_whole_ones(precision, limit):
    for worst, types in run_ranks(2, whole_and_sharded, precision):
        assert worst <= limit and types == {torch.float32}
