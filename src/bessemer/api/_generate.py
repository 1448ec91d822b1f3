"""The verb `generate`."""

from __future__ import annotations

from bessemer.api._extras import need

__all__ = ["generate"]


def generate(
    run: str,
    *,
    prompt: str = "",
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """Let a trained model go on with a text; returns the text with what the model added.

    run: A run folder (its newest checkpoint that verifies) or a checkpoint folder.
    prompt: The text to go on with; empty starts a new document.
    max_new_tokens: At most this many tokens; the model may end the document before.
    temperature: 0 takes the likeliest token each time; 1 samples from the model's own distribution.
    top_k: Sample only among this many likeliest tokens; 0: among all.
    top_p: Sample only among the likeliest tokens that hold this share of the probability.
    seed: The same seed gives the same text.
    """
    need("generate", "train")
    from bessemer.data.tokenizers import FileTokenizer
    from bessemer.infer import Sampling
    from bessemer.infer import generate as generate_tokens
    from bessemer.train.opened import open_trained

    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    trained = open_trained(run)
    tokenizer = FileTokenizer(trained.tokenizer_file)
    start = tokenizer.encode_batch([prompt])[0].tolist() or [tokenizer.eos_id]
    (tokens,) = generate_tokens(
        trained.module(), [start], max_new_tokens=max_new_tokens, sampling=sampling, stop=(tokenizer.eos_id,)
    )
    return prompt + tokenizer.decode(tokens[len(start) :])
