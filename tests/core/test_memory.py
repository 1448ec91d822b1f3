"""The memory estimate: its lines against counts done by hand, and the fixes that it proposes."""

import pytest

from bessemer.core.counts import parameter_counts
from bessemer.core.job import Job
from bessemer.core.machine import load_machine
from bessemer.core.memory import job_bytes, memory_lines, memory_problem
from bessemer.core.presets import preset
from bessemer.core.resolve import DEFAULT_CONFIG, resolve_model

DEFAULT = {"family": "llama", **{key: value for key, value in DEFAULT_CONFIG.items() if key != "model_type"}}


def job(**sections):
    return Job.model_validate(sections)


def test_state_of_one_process_is_counted_tensor_by_tensor():
    plain = job(precision={"recipe": "fp32"})
    spec = resolve_model(plain.model)
    params = parameter_counts(spec).total
    lines = memory_lines(plain, spec)
    assert lines["parameters"] == lines["gradients"] == 4 * params
    assert lines["optimizer"] == 8 * params
    assert lines["checkpoint_copy"] == 12 * params
    assert "gradient_sum" not in lines


def test_muon_keeps_one_moment_of_the_hidden_matrices():
    adamw, muon = job(), job(train={"optimizer": "muon"})
    spec = resolve_model(adamw.model)
    counts = parameter_counts(spec)
    saved = memory_lines(adamw, spec)["optimizer"] - memory_lines(muon, spec)["optimizer"]
    assert saved == 4 * (counts.attention + counts.dense_ffn)


@pytest.mark.parametrize(("moments", "a_moment"), [("bf16", 2), ("fp8", 1 + 4 / 128)])
def test_narrow_moments_spare_what_has_one_dimension(moments, a_moment):
    narrow = job(precision={"moments": moments})
    spec = resolve_model(narrow.model)
    params = parameter_counts(spec).total
    vectors = (2 * spec.num_layers + 1) * spec.hidden_size
    lines = memory_lines(narrow, spec)
    assert lines["optimizer"] == 2 * a_moment * (params - vectors) + 8 * vectors
    assert lines["checkpoint_copy"] == 4 * params + 4 * (params - vectors) + 8 * vectors


@pytest.mark.parametrize(
    ("kind", "split", "whole"),
    [
        ("none", set(), {"parameters", "gradients", "optimizer"}),
        ("optimizer", {"parameters", "optimizer"}, set()),
        ("gradient", {"parameters", "gradients", "optimizer"}, set()),
        ("full", {"parameters", "gradients", "optimizer"}, set()),
    ],
)
def test_sharding_divides_what_it_names(kind, split, whole):
    train = {"micro_batch": 2, "global_batch": 16}
    one, four = job(train=train), job(train=train, layout={"dp": 4, "dp_shard": kind})
    spec = resolve_model(one.model)
    alone, shared = memory_lines(one, spec), memory_lines(four, spec)
    assert all(shared[name] == alone[name] // 4 for name in split)
    assert all(shared[name] == alone[name] for name in whole)
    if (
        kind == "optimizer"
    ):  # two micro-batches a step: their gradients add up whole, then this rank's part is scattered
        assert shared["gradients"] == alone["gradients"] * 5 // 4
    assert ("gathered_parameters" in shared) == (kind != "none")
    assert ("gradient_sum" in shared) == (kind == "none")


def test_activations_grow_with_the_micro_batch_and_layers():
    small, large = job(train={"micro_batch": 2}), job(train={"micro_batch": 8})
    spec = resolve_model(small.model)
    head = 4 * spec.vocab_size * spec.hidden_size  # its gradient waits for the backward pass, however many tokens
    one, four = (memory_lines(j, spec)["activations"] - head for j in (small, large))
    assert four == 4 * one
    deep = spec.model_copy(update={"num_layers": 12})
    assert 1.9 * one < memory_lines(small, deep)["activations"] - head < 2 * one


def test_activations_of_a_layer_by_hand():
    plain = job(precision={"recipe": "fp32"}, train={"micro_batch": 1}, data={"seq_len": 16})
    spec = resolve_model(plain.model)  # D 256, 8 heads and 4 key/value heads of 32, F 768
    stream = 2 * (4 + 4) * 256  # both norms: their input, and their output in the compute type
    inner = 4 * ((256 + 2 * 128) + 256 + 3 * 768)  # q, k, v; attention output; gate, up and their product
    layer = stream + inner + 4 * 8 + 2 * 4  # with the statistics of softmax and norms
    end = 4 * 256 + 4 + 4 * 256  # the last norm's input with its statistics, and the gradient of its output
    head = 4 * 4096 * 256  # the gradient of the head, which the loss makes in the forward pass
    assert memory_lines(plain, spec)["activations"] == 16 * (6 * layer + end) + head


@pytest.mark.parametrize("keys", [{}, {"num_key_value_heads": 8, "intermediate_size": 1024}, {"family": "qwen3"}])
def test_activations_are_what_the_decoder_saves(keys):
    """Bytes of all tensors that autograd holds between forward and backward, parameters left out; the gradients that
    the loss makes early, of the hidden states and of the head, it holds besides."""
    torch = pytest.importorskip("torch")
    from bessemer.models.build import build

    plain = job(train={"micro_batch": 2, "global_batch": 2}, model={**DEFAULT, **keys})
    spec = resolve_model(plain.model)
    model = build(spec, seed=0, compute_dtype=torch.bfloat16)
    tokens = torch.randint(0, spec.vocab_size, (2, 256))
    params = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held = {}

    def walk(node, seen):
        if node is None or node in seen:
            return
        seen.add(node)
        for tensor in getattr(node, "saved_tensors", ()):
            if tensor is not None and tensor.untyped_storage().data_ptr() not in params:
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        for following, _ in node.next_functions:
            walk(following, seen)

    loss, _ = model(tokens, tokens)
    walk(loss.grad_fn, set())
    early = 2 * 2 * 256 * spec.hidden_size + 4 * spec.vocab_size * spec.hidden_size
    assert memory_lines(plain, spec)["activations"] == pytest.approx(
        sum(held.values()) + early, rel=0.003
    )  # rotation tables


def test_published_llama_70b_state_on_eight_ranks():
    spec = preset("llama-3-70b")
    lines = memory_lines(job(layout={"dp": 8, "dp_shard": "full"}), spec)
    assert lines["optimizer"] == 70_553_706_496  # 8 bytes a parameter over 8 ranks


def test_pipeline_and_tensor_ranks_hold_their_part():
    spec = preset("llama-3-70b")
    whole = memory_lines(job(), spec)
    part = memory_lines(job(layout={"tp": 8, "pp": 4}), spec)
    assert whole["parameters"] / 32 < part["parameters"] < 1.1 * whole["parameters"] / 32


def test_ranks_of_a_cpu_share_its_memory():
    machine = load_machine("cpu-local")
    spec = resolve_model(job().model)
    assert job_bytes(job(layout={"dp": 2}), spec, machine) > 1.9 * job_bytes(job(), spec, machine)
    gpu = load_machine("h100")
    assert job_bytes(job(layout={"dp": 2}), spec, gpu) < 1.2 * job_bytes(job(), spec, gpu)


def test_a_job_that_fits_has_no_problem_and_unknown_memory_makes_none():
    spec = preset("llama-3-8b")
    assert memory_problem(job(), resolve_model(job().model), load_machine("h100")) is None
    assert memory_problem(job(), spec, load_machine("gb300")) is None  # its memory isn't known


@pytest.mark.parametrize(
    ("train", "where", "fix"),
    [
        (
            {"micro_batch": 2, "global_batch": 64},
            "layout.dp_shard",
            'layout.dp_shard = "full" and train.micro_batch = 1',
        ),
        ({"micro_batch": 1, "global_batch": 64}, "layout.dp_shard", 'layout.dp_shard = "full"'),
    ],
)
def test_the_fix_is_one_that_fits(train, where, fix):
    spec, machine = preset("llama-3-8b"), load_machine("h100")
    problem = memory_problem(job(train=train, data={"seq_len": 8192}, layout={"dp": 8}), spec, machine)
    assert problem.code == "memory"
    assert problem.where == where
    assert problem.fix == fix
    layout = {"dp": 8, "dp_shard": "full"}
    mended = job(train={**train, "micro_batch": 1}, data={"seq_len": 8192}, layout=layout)
    assert memory_problem(mended, spec, machine) is None


def test_a_model_that_fits_nowhere_says_so():
    problem = memory_problem(job(train={"micro_batch": 1}), preset("deepseek-v3"), load_machine("h100"))
    assert problem.where == "machine.name"
    assert "smaller model" in problem.fix
