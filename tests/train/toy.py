"""A small job and an in-memory data set for tests of the step: packed documents, unequal numbers of counted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bessemer.core.hf_config import resolve_model
from bessemer.core.job import Job
from bessemer.parallel.mesh import build_mesh
from bessemer.train.assembly import Assembly, assemble
from bessemer.train.passes import Batch
from bessemer.train.step import StepResult, rank_micro_batches

VOCAB, SEQ = 97, 32
MODEL = {
    "family": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
MIXTRAL = MODEL | {
    "family": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.05,
    "router_z_loss_coef": 0.01,
    "initializer_range": 0.2,  # scores far apart, so that no rounding changes an expert's tokens
}
DEEPSEEK = MODEL | {
    "family": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
    "aux_loss_alpha": 0.05,
    "num_nextn_predict_layers": 1,
    "initializer_range": 0.2,
}
QWEN3 = MODEL | {"family": "qwen3", "head_dim": 16, "tie_word_embeddings": False}
GPT2 = {
    "family": "gpt2",
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "tie_word_embeddings": True,
}
MODELS = {"llama": MODEL, "qwen3": QWEN3, "gpt2": GPT2, "mixtral": MIXTRAL, "deepseek_v3": DEEPSEEK}


def toy_job(**sections: dict[str, Any]) -> Job:
    """A job of the toy model in fp32; sections update the defaults."""
    base: dict[str, dict[str, Any]] = {
        "model": dict(MODEL),
        "data": {"seq_len": SEQ},
        "train": {"steps": 6, "global_batch": 8, "micro_batch": 2, "warmup_steps": 2, "lr": 0.01},
        "precision": {"recipe": "fp32"},
    }
    for name, fields in sections.items():
        whole = name == "model" and "family" in fields
        base[name] = fields if whole else base.get(name, {}) | fields
    return Job.model_validate(base)


def toy_batch(ids: list[int]) -> Batch:
    """The samples `ids`: content depends on the id alone; two documents a sample and a varying share of weights 0."""
    tokens, labels, weights, segments = [], [], [], []
    for sample in ids:
        rng = np.random.default_rng(sample)
        stream = rng.integers(0, VOCAB, SEQ + 1)
        cut = int(rng.integers(4, SEQ - 4))
        tokens.append(stream[:-1])
        labels.append(stream[1:])
        weights.append((rng.random(SEQ) < 0.3 + 0.6 * (sample % 3) / 2).astype(np.float32))
        segments.append((np.arange(SEQ) >= cut).astype(np.int32))
    return {
        "tokens_BS": torch.from_numpy(np.stack(tokens)),
        "labels_BS": torch.from_numpy(np.stack(labels)),
        "weights_BS": torch.from_numpy(np.stack(weights)),
        "segments_BS": torch.from_numpy(np.stack(segments)),
    }


def toy_parts(job: Job, rank: int = 0) -> Assembly:
    spec = resolve_model(job.model)
    return assemble(job, spec, build_mesh(job, rank, torch.device("cpu"), spec))


def run_steps(parts: Assembly, first: int, stop: int) -> Iterator[StepResult]:
    """Run the steps [first, stop) of a rank on toy data."""
    mesh, job = parts.mesh, parts.job
    for step in range(first, stop):
        lists = rank_micro_batches(job, step, mesh.at("replica"), mesh.at("shard"))
        yield parts.step.run(step, iter([toy_batch(ids) for ids in lists]), len(lists))
