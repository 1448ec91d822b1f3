"""Training evens out the load of sixteen experts by the selection bias alone, and not without it.

The text is a chain: each token has four successors, likely ones more often than others, and no step sees a sample
again. So a model that learns comes near the chain's entropy, 0.91 nats a token.
"""

import numpy as np
import pytest
import torch
from train.toy import DEEPSEEK, SEQ, VOCAB, toy_job, toy_parts

SIXTEEN = DEEPSEEK | {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 0,
    "n_routed_experts": 16,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "aux_loss_alpha": 0.0,
    "num_nextn_predict_layers": 0,
}
STEPS, WINDOW = 300, 20
SAMPLES = 48  # 48 x 32 tokens x 2 choices: 192 an expert and step, of which chance alone makes the largest 1.13 means
LIKELY = np.array([0.7, 0.15, 0.1, 0.05])


def successors() -> np.ndarray:
    """The four successors of each token, [VOCAB, 4]; a few tokens follow on many others."""
    generator = np.random.default_rng(0)
    popular = 1 / (np.arange(VOCAB) + 30)
    return np.stack([generator.choice(VOCAB, 4, replace=False, p=popular / popular.sum()) for _ in range(VOCAB)])


def chain_batch(step: int, after: np.ndarray) -> dict[str, torch.Tensor]:
    """The samples of a step, each one document that counts as a whole."""
    generator = np.random.default_rng([1, step])
    text = np.empty((SAMPLES, SEQ + 1), np.int64)
    text[:, 0] = generator.integers(0, VOCAB, SAMPLES)
    for at in range(SEQ):
        text[:, at + 1] = after[text[:, at], generator.choice(4, SAMPLES, p=LIKELY)]
    return {
        "tokens_BS": torch.from_numpy(text[:, :-1].copy()),
        "labels_BS": torch.from_numpy(text[:, 1:].copy()),
        "weights_BS": torch.ones(SAMPLES, SEQ),
        "segments_BS": torch.zeros(SAMPLES, SEQ, dtype=torch.int32),
    }


def train(**router: float) -> tuple[np.ndarray, list[float]]:
    """(the largest load over the mean one, averaged over each WINDOW steps; the losses)."""
    sizes = {"steps": STEPS, "lr": 0.003, "global_batch": SAMPLES, "micro_batch": SAMPLES}
    parts, after = toy_parts(toy_job(model=SIXTEEN | router, train=sizes)), successors()
    results = [parts.step.run(step, iter([chain_batch(step, after)]), 1) for step in range(STEPS)]
    assert all(r.experts.dropped == 0 for r in results)
    imbalance = np.array([r.experts.imbalance[0] for r in results])
    return np.convolve(imbalance, np.full(WINDOW, 1 / WINDOW), "valid"), [r.loss for r in results]


@pytest.mark.slow
def test_the_bias_evens_out_sixteen_experts_within_300_steps():
    moved, losses = train()  # at the rate that a model has unless its config says otherwise
    assert moved[0] > 2
    assert moved[-1] < 1.3, moved[::WINDOW]
    assert losses[0] > 4 and np.mean(losses[-WINDOW:]) < 1.4, losses[::WINDOW]
    left, losses = train(router_bias_rate=0.0)
    assert left.min() > 2, left[::WINDOW]
    assert np.mean(losses[-WINDOW:]) < 1.4
