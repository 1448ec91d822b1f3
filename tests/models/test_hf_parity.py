"""Logits and gradients of every family against transformers; the way there and back."""

import json

import families
import pytest
import torch
import torch.nn.functional as F
from families import CASES, VOCAB
from transformers import AutoModelForCausalLM

from bessemer import ops
from bessemer.models.build import build
from bessemer.models.canonical import pieces, state
from bessemer.models.hf import export_hf, import_hf
from bessemer.models.hf_names import hf_tensors

LOGITS = 2e-5  # absolute, on logits of size about 1


@pytest.fixture(params=CASES)
def pair(request, tmp_path):
    theirs = families.peer(request.param)
    return theirs, families.ours_from(theirs, tmp_path / "hf")


@pytest.mark.parametrize("path", ["reference", "auto"])
def test_logits_and_gradients_equal_transformers(pair, path):
    theirs, ours = pair
    inputs, labels = families.tokens(), families.tokens(seed=4)
    expected = theirs(input_ids=inputs).logits
    F.cross_entropy(expected.view(-1, VOCAB), labels.view(-1), reduction="sum").backward()
    with ops.use(path):
        torch.testing.assert_close(ours.logits(inputs), expected, atol=LOGITS, rtol=1e-4)
        loss, weight = ours(inputs, labels)
        loss.backward()
    assert weight.item() == labels.numel()
    grads = families.peer_gradients(theirs)
    mine = dict(_gradients(ours))
    scale = torch.stack([g.norm() for g in grads.values()]).norm() / sum(g.numel() for g in grads.values()) ** 0.5
    checked = set()
    for tensor in hf_tensors(ours.spec):
        if tensor.name.endswith("e_score_correction_bias"):
            continue  # moved by the load, not by a gradient
        want = grads.pop(tensor.name)
        for part, rows in zip(tensor.parts, (want.t() if tensor.transposed else want).split(tensor.rows), strict=True):
            limit = 2e-5 * max(rows.abs().max(), 1e-2 * scale)
            got = mine[part] if tensor.expert is None else mine[part][tensor.expert]
            assert (got - rows).abs().max() <= limit, (part, tensor.expert)
            checked.add(part)
    assert checked == set(mine) and not grads


def _gradients(model):
    parameters = dict(model.named_parameters())
    for p in (p for p in pieces(model) if parameters[p.param].requires_grad):
        yield p.name, parameters[p.param].grad[p.row : p.row + p.rows]


def test_there_and_back_is_bitwise_and_transformers_loads_it(pair, tmp_path):
    _, ours = pair
    folder = tmp_path / "export"
    export_hf(ours.spec, state(ours), folder)
    again = build(ours.spec, seed=9)
    import_hf(again, folder)
    for (name, a), (_, b) in zip(state(ours), state(again), strict=True):
        assert torch.equal(a, b), name
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    inputs = families.tokens()
    torch.testing.assert_close(loaded.eval()(inputs).logits, ours.logits(inputs), atol=LOGITS, rtol=1e-4)


def test_shards_and_bf16(tmp_path):
    ours = families.ours_from(families.peer("llama"), tmp_path / "hf")
    folder = tmp_path / "export"
    export_hf(ours.spec, state(ours), folder, dtype=torch.bfloat16, shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2 and files == {p.name for p in folder.glob("*.safetensors")}
    again = build(ours.spec, seed=9)
    import_hf(again, folder)
    for (name, a), (_, b) in zip(state(ours), state(again), strict=True):
        assert torch.equal(a.bfloat16().float(), b), name
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = families.tokens()
    torch.testing.assert_close(loaded(inputs).logits, again.logits(inputs), atol=LOGITS, rtol=1e-4)
