"""The loop over tokens for a batch of prompts of any lengths."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from bessemer.core.errors import RequestError
from bessemer.infer.cache import KvCache
from bessemer.infer.latent import LatentCache
from bessemer.infer.sampling import Sampling, sample
from bessemer.models.decoder import Decoder

__all__ = ["generate"]


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop: Collection[int] = (),
) -> list[list[int]]:
    """Each prompt with what the model adds to it: at most `max_new_tokens`, ending before the first token in `stop`.

    Prompts are filled in once, together; each sequence then goes on from its own length, and leaves the batch when it
    stops. Default sampling: the likeliest token. RequestError for an empty or too long prompt, or unknown token ids.
    """
    _check(model, prompts, max_new_tokens)
    sampling = sampling or Sampling(temperature=0.0)
    sequences = [list(p) for p in prompts]
    if not sequences or max_new_tokens == 0:
        return sequences
    device = model.embed.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(lengths.max())
    kind = KvCache if model.spec.mla is None else LatentCache
    cache = kind(model.spec, len(prompts), longest + max_new_tokens, dtype=model.compute_dtype, device=device)
    padded = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(list(prompt), device=device)
    cache.begin(torch.zeros_like(lengths), longest)
    logits = model.logits(padded, cache=cache)[torch.arange(len(prompts), device=device), lengths - 1]
    live = list(range(len(prompts)))
    for step in range(max_new_tokens):
        chosen = sample(logits, sampling, live, [len(sequences[i]) for i in live]).tolist()
        going = [row for row, token in enumerate(chosen) if token not in stop]
        for row in going:
            sequences[live[row]].append(chosen[row])
        if not going or step == max_new_tokens - 1:
            break
        if len(going) < len(live):
            rows = torch.tensor(going, device=device)
            cache.keep(rows)
            lengths = lengths[rows]
            live = [live[row] for row in going]
        cache.begin(lengths, 1)
        tokens = torch.tensor([chosen[row] for row in going], device=device)[:, None]
        logits = model.logits(tokens, cache=cache)[:, -1]
        lengths = lengths + 1
    return sequences


def _check(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    spec = model.spec
    if max_new_tokens < 0:
        raise RequestError(f"max_new_tokens = {max_new_tokens}", code="generate-length", fix="0 or more")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise RequestError(
                f"prompt {number} is empty", code="generate-prompt", fix="start with the end-of-text token"
            )
        if not 0 <= min(prompt) <= max(prompt) < spec.vocab_size:
            raise RequestError(
                f"prompt {number} has token ids outside of the vocabulary [0, {spec.vocab_size})",
                code="generate-prompt",
                fix="encode it with the tokenizer that the model was trained with",
            )
        if len(prompt) + max_new_tokens > spec.max_positions:
            raise RequestError(
                f"prompt {number} of {len(prompt)} tokens and {max_new_tokens} new ones exceed the model's "
                f"{spec.max_positions} positions",
                code="generate-length",
                fix=f"max_new_tokens = {max(spec.max_positions - len(prompt), 0)} or a shorter prompt",
            )
