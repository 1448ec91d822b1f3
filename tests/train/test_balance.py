"""The experts' load: summed with the step, reported, and answered by the selection bias."""

import pytest
import torch
from router_margin import routers
from train.toy import DEEPSEEK, MODELS, run_steps, toy_batch, toy_job, toy_parts

from bessemer.models.canonical import Piece
from bessemer.train.balance import imbalance, move_selection_biases
from bessemer.train.optim import Muon


def test_the_bias_moves_towards_the_mean_and_only_at_the_commit():
    parts = toy_parts(toy_job(model=DEEPSEEK))
    before = [r.bias.clone() for r in routers(parts.module)]
    assert not any(b.any() for b in before)
    result = next(iter(run_steps(parts, 0, 1)))
    found = routers(parts.module)
    assert all(torch.isin(r.bias, torch.tensor([-1e-3, 0.0, 1e-3])).all() and r.bias.any() for r in found)
    assert len(result.experts.imbalance) == len(found) == 2 and result.experts.dropped == 0
    load = torch.tensor([[6.0, 0, 0, 0, 0, 0], [1.0] * 6], dtype=torch.float64)
    move_selection_biases(parts.module, load)
    step = [r.bias for r in found]
    move_selection_biases(parts.module, load)
    assert imbalance(load) == [6.0, 1.0]
    assert step[0][0] < 0 < step[0][1]


@pytest.mark.parametrize(("family", "optimizer"), [("mixtral", "adamw"), ("deepseek_v3", "muon")])
def test_models_with_experts_learn(family, optimizer):
    train = {"steps": 20, "optimizer": optimizer, "global_batch": 4, "micro_batch": 4}
    parts = toy_parts(toy_job(model=MODELS[family], train=train))
    losses = [parts.step.run(step, iter([toy_batch([0, 1, 2, 3])]), 1).loss for step in range(20)]
    assert losses[-1] < 0.8 * losses[0], losses


def test_muon_updates_each_experts_matrix_by_itself():
    weight = torch.nn.Parameter(torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1)))
    gradient = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(2))
    apart = [torch.nn.Parameter(matrix.clone()) for matrix in weight.detach()]
    stack = Piece("w", "w", 0, 3, (3, 8, 4), (0, 0, 0), (8, 4), expert=True)
    rows = {weight: [stack], **{p: [Piece("w", "w", 0, 8, (8, 4), (0, 0), (4,))] for p in apart}}
    muon = Muon([weight, *apart], rows, lambda piece, block: block, lr=0.1, momentum=0.9, weight_decay=0.0)
    for param, grad in ((weight, gradient), *zip(apart, gradient, strict=True)):
        muon.state[param]["momentum"] = torch.zeros_like(param)
        param.grad = grad.clone()
    before = weight.detach().clone()
    muon.step()
    assert all(torch.equal(ours, alone) for ours, alone in zip(weight.detach(), apart, strict=True))
    assert (weight - before).norm() > 0.1


def test_evaluation_neither_counts_nor_moves_anything():
    parts = toy_parts(toy_job(model=DEEPSEEK))
    with torch.no_grad():
        parts.module(**toy_batch([5, 6]))
    assert not any(r.bias.any() for r in routers(parts.module))
    assert next(iter(run_steps(parts, 0, 1))).experts.dropped == 0
