"""Training speed of one process beside transformers' own Llama of the same shape in a plain loop.

Both have the same weights, batch, AdamW (fused), clipping and type: bf16 is autocast over fp32 masters for the peer,
and `compute_dtype` over fp32 masters for ours. The peer runs with SDPA. Both use one thread, as
each of the demo's two processes does, and CPU seconds count: the wall clock of two threads that wait for each other
says more about what else runs on a shared machine. Steps are interleaved, and the fastest of each counts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from table import Row, main
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bessemer import ops
from bessemer.core.hf_config import spec_from_config
from bessemer.models.build import build
from bessemer.models.hf import import_hf

THREADS = 1
STEPS = 6
BATCH, SEQ = 8, 256


@dataclass(frozen=True)
class Shape:
    """A Llama, named by its parameters; `bar` is the ratio over the peer that it should reach."""

    name: str
    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv: int
    bar: float

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            use_cache=False,
        )


SHAPES = (
    Shape("5.8M", 4096, 256, 768, 6, 8, 4, 1.3),  # examples/first_heat.toml
    Shape("30M", 8192, 512, 1536, 8, 8, 4, 1.15),
)


def rows() -> list[Row]:
    """Tokens per CPU second of both, their ratio, and attention alone beside torch's."""
    torch.set_num_threads(THREADS)
    found: list[Row] = []
    for shape in SHAPES:
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            found += _train(shape, name, dtype)
    for name, documents in (("causal", 1), ("8 packed documents", 8)):
        found += _attention(name, documents)
    return found


def _train(shape: Shape, name: str, dtype: torch.dtype) -> list[Row]:
    torch.manual_seed(1)
    theirs = LlamaForCausalLM(shape.config()).train()
    theirs.set_attn_implementation("sdpa")
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        spec = spec_from_config(json.loads((Path(folder) / "config.json").read_text()))
        ours = build(spec, seed=0, compute_dtype=dtype)
        import_hf(ours, folder)
    ids = torch.randint(0, shape.vocab, (BATCH, SEQ + 1))
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def peer_loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            # Labels are given shifted, so that both train on the same tokens.
            return theirs(input_ids=tokens, labels=labels, shift_labels=labels).loss

    def our_loss() -> Tensor:
        total, weight = ours(tokens, labels)
        return total / weight

    peer_s, our_s, first = _interleaved(_stepper(theirs, peer_loss), _stepper(ours, our_loss))
    if abs(first[0] - first[1]) > 2e-3 * first[0]:
        raise SystemExit(f"{shape.name} {name}: the first losses differ, {first}: not the same work")
    count = BATCH * SEQ
    kernels = "native kernels" if not ops.why_absent() else "reference operators"
    label = f"{shape.name} {name}"
    return [
        Row(f"{label}, transformers", count / peer_s[0], "tokens/CPU s", "higher", note=_spread(peer_s)),
        Row(f"{label}, bessemer", count / our_s[0], "tokens/CPU s", "higher", note=f"{_spread(our_s)}, {kernels}"),
        Row(f"{label}, over transformers", peer_s[0] / our_s[0], "x", "higher", bar=shape.bar),
    ]


def _stepper(model: Any, loss_of: Callable[[], Tensor]) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def _interleaved(*steps: Callable[[], float]) -> tuple[list[float], list[float], list[float]]:
    """Sorted CPU seconds of each, and their first losses; the first two steps warm up and don't count."""
    first = [step() for step in steps]
    for step in steps:
        step()
    seconds: tuple[list[float], ...] = tuple([] for _ in steps)
    for _ in range(STEPS):
        for step, taken in zip(steps, seconds, strict=True):
            start = time.process_time()
            step()
            taken.append(time.process_time() - start)
    return sorted(seconds[0]), sorted(seconds[1]), first


def _spread(seconds: list[float]) -> str:
    median = seconds[len(seconds) // 2]
    return f"min of {len(seconds)}: {seconds[0] * 1e3:.1f} ms, median {median * 1e3:.1f} ms"


def _attention(name: str, documents: int) -> list[Row]:
    """Forward and backward of one layer's attention, torch's SDPA (an explicit mask for documents) beside ours."""
    batch, heads, kv, seq, dim = 2, 8, 4, 1024, 64
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(batch, n, seq, dim, generator=generator).bfloat16() for n in (heads, kv, kv)]
    q, k, v = (p.requires_grad_() for p in parts)
    segments = (torch.arange(seq) // (seq // documents)).expand(batch, seq)
    starts = ops.first_keys(segments, batch, seq, None)

    def run(path: str) -> Callable[[], float]:
        def once() -> float:
            with ops.use(path):  # type: ignore[arg-type]
                out = ops.attend(q, k, v, starts)
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            return 0.0

        return once

    torch_s, our_s, _ = _interleaved(run("reference"), run("auto"))
    return [
        Row(
            f"attention, {name}, over torch's SDPA",
            torch_s[0] / our_s[0],
            "x",
            "higher",
            note=f"S {seq}, E {dim}, bf16",
        )
    ]


if __name__ == "__main__":
    main(rows)
