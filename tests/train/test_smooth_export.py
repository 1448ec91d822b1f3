"""`bessemer export --smooth-fold`: the same function, bit for bit, whose down projections fit one scale of FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train.loops import small_job, train
from train.test_smooth_training import amplify
from train.toy import DEEPSEEK, GPT2, MODEL
from transformers import AutoModelForCausalLM

from bessemer import api
from bessemer.core.errors import RequestError
from bessemer.core.hf_config import resolve_model
from bessemer.core.job import ModelSection
from bessemer.data import prepare
from bessemer.models.build import build
from bessemer.models.canonical import load_state, state
from bessemer.models.decoder import Decoder
from bessemer.models.folding import down_scales, folded_state
from bessemer.models.hf import export_hf, import_hf
from bessemer.precision import multiply, numerics, quantise
from bessemer.precision.outliers import relative_error
from bessemer.train.opened import keep_tokenizer

TOKENS = torch.randint(0, 97, (4, 32), generator=torch.Generator().manual_seed(1))
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_of(fields: dict[str, Any], dtype: torch.dtype = torch.float32, factor: float = 1.0) -> Decoder:
    model = build(resolve_model(ModelSection.model_validate(fields)), seed=3, compute_dtype=dtype).eval()
    amplify(model, factor)
    return model


def scales_of(model: Decoder, tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    return down_scales(model, lambda: model.logits(tokens))


def folded(model: Decoder, dtype: torch.dtype = torch.float32) -> Decoder:
    again = build(model.spec, seed=4, compute_dtype=model.compute_dtype).eval()
    load_state(again, folded_state(state(model), scales_of(model), dtype))
    return again


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES.keys())
@pytest.mark.parametrize("fields", [MODEL | {"mlp_bias": True}, DEEPSEEK], ids=lambda f: f["family"])
def test_a_folded_model_is_the_same_function_bitwise(fields: dict[str, Any], dtype: torch.dtype) -> None:
    """Dense with biases; latent attention with routed and shared experts. Also on tokens that it wasn't folded on."""
    model = model_of(fields, dtype, 64.0)
    for param in (p for n, p in model.named_parameters() if n.endswith(".bias")):
        torch.nn.init.normal_(param)
    scales = scales_of(model)
    assert sum(bool((s != 1).any()) for s in scales.values()) == len(scales) >= 2
    if fields is DEEPSEEK:
        assert {s.dim() for s in scales.values()} == {1, 2}
    same = folded(model)
    for tokens in (TOKENS, TOKENS.flip(1)):
        assert torch.equal(same.logits(tokens), model.logits(tokens))
    for name, scale in scales_of(same).items():
        assert bool((scale <= 1).all()), name


def test_one_scale_serves_a_folded_down_projection() -> None:
    """Per-tensor FP8 of what is written, without any scale for channels, at an amplification of 128."""
    errors = {}
    for name, model in (("plain", loud := model_of(MODEL, factor=128.0)), ("folded", folded(loud))):
        down = model.block(1).mlp.down
        entered: list[Tensor] = []
        hook = down.register_forward_pre_hook(lambda _module, inputs, entered=entered: entered.append(inputs[0]))
        model.logits(TOKENS)
        hook.remove()
        h_TF, how = entered[0].flatten(0, 1).detach(), numerics("fp8-current")
        made = multiply(quantise(h_TF, how.x), quantise(down.weight, how.weight))
        errors[name] = relative_error(made, h_TF.double() @ down.weight.detach().double().t())
    assert errors["plain"] > 0.25 and errors["folded"] < 0.045, errors


@pytest.mark.parametrize("dtype", TYPES)
def test_transformers_gives_the_same_logits_bitwise(tmp_path: Path, dtype: str) -> None:
    model = model_of(MODEL, factor=64.0)
    export_hf(model.spec, state(model), tmp_path / "plain", dtype=TYPES[dtype])
    export_hf(
        model.spec, folded_state(state(model), scales_of(model), TYPES[dtype]), tmp_path / "folded", dtype=TYPES[dtype]
    )
    theirs = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=TYPES[dtype]).eval() for name in ("plain", "folded")
    ]
    for tokens in (TOKENS, TOKENS.flip(1)):
        with torch.no_grad():
            one, other = (m(tokens).logits for m in theirs)
        assert one.dtype == TYPES[dtype] and torch.equal(one, other)
    ups = [dict(m.named_parameters())["model.layers.0.mlp.up_proj.weight"] for m in theirs]
    assert not torch.equal(*ups)


@pytest.mark.slow
def test_the_verb_folds_a_run(tmp_path: Path) -> None:
    """Trained under delayed scaling, whose histories are no part of the model."""
    wide = MODEL | {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 257}
    job = small_job(tmp_path, model=wide, precision={"recipe": "fp8-delayed", "smooth": True}, train={"steps": 2})
    train(job)
    keep_tokenizer(job.run.folder, prepare(job).tokenizer_json)
    run = str(job.run.folder)
    plain = api.export(run, to=str(tmp_path / "plain"), dtype="fp32")
    smooth = api.export(run, to=str(tmp_path / "smooth"), dtype="fp32", smooth_fold=True)
    assert (plain.folded, smooth.folded) == (0, 2) and "2 down projections smoothed" in str(smooth)
    models = []
    for result in (plain, smooth):
        models.append(build(resolve_model(job.model), seed=7).eval())
        import_hf(models[-1], result.folder)
    assert torch.equal(*(m.logits(TOKENS) for m in models))
    assert not torch.equal(*(m.block(0).mlp.down.weight for m in models))


def test_what_cant_be_folded_is_refused(tmp_path: Path) -> None:
    ungated = ModelSection.model_validate(GPT2 | {"vocab_size": 257})
    job = small_job(tmp_path, train={"steps": 1}).model_copy(update={"model": ungated})
    train(job)
    with pytest.raises(RequestError, match="has no gate") as refused:
        api.export(str(job.run.folder), to=str(tmp_path / "hf"), smooth_fold=True)
    assert refused.value.code == "fold-gate" and not (tmp_path / "hf").exists()
    model = model_of(MODEL, factor=2.0**10)
    with pytest.raises(RequestError, match="leaves the range of float16") as refused:
        list(folded_state(state(model), scales_of(model), torch.float16))
    assert refused.value.code == "fold-range"
