"""What emulating each recipe costs on a CPU, and how fast it quantises.

    python bench/precision.py [--json]

A whole step of the default job's model (6 layers of width 256, 8 sequences of 256 tokens) under each recipe beside that
in bf16, optimizer and all; and forward and backward of one linear layer (1024 tokens, 512 inputs, 1536 outputs, bf16
around float32 masters). One thread, CPU seconds, interleaved, the fastest of each counts. The outliers' errors are
those of docs/precision.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from table import Row, main
from torch import Tensor

from bessemer import ops
from bessemer.core.job_file import load_job
from bessemer.core.recipes import RECIPES
from bessemer.core.resolve import resolve_model
from bessemer.parallel.mesh import build_mesh
from bessemer.precision import Call, Numerics, keyed_generator, numerics, quant_linear, quantise
from bessemer.precision.outliers import amplified_layer, down_errors
from bessemer.train.assembly import assemble

JOB = Path(__file__).parent.parent / "examples" / "first_heat.toml"
TOKENS, INPUTS, OUTPUTS = 1024, 512, 1536
ROUNDS, STEP_ROUNDS = 7, 4
BARS = {"fp8-delayed": 1.4, "fp8-current": 1.4, "fp8-block128": 1.8}


def fastest(work: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """CPU seconds of the fastest of that many interleaved calls of each."""
    best = dict.fromkeys(work, float("inf"))
    for _ in range(rounds):
        for name, call in work.items():
            start = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - start)
    return best


def layer_step(n: Numerics | None) -> Callable[[], None]:
    """Forward and backward of one layer; None: plain bf16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, INPUTS, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator).requires_grad_()
    grad = torch.randn(TOKENS, OUTPUTS, generator=generator).bfloat16()

    def step() -> None:
        if n is None:
            y: Tensor = ops.linear(x, weight, None, torch.bfloat16)
        else:
            history = torch.zeros(3, n.history) if n.delayed else None
            rounding = keyed_generator(1) if n.stochastic else None
            y = quant_linear(x, weight, None, Call(n, history, generator=rounding))
        y.backward(grad)
        x.grad = weight.grad = None

    return step


def whole_step(recipe: str) -> Callable[[], None]:
    """A training step of the default job's model on tokens drawn at random, the first one (without which a delayed
    recipe knows no amaxes) done."""
    job = load_job(JOB, ["layout.dp=1", "train.global_batch=8", f"precision.recipe={recipe}"])
    spec = resolve_model(job.model)
    parts = assemble(job, spec, build_mesh(job, 0, torch.device("cpu"), spec))
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, spec.vocab_size, (8, job.data.seq_len + 1), generator=draws)
    batch = {"tokens_BS": tokens[:, :-1].contiguous(), "labels_BS": tokens[:, 1:].contiguous()}
    done = iter(range(1000))

    def step() -> None:
        parts.step.run(next(done), iter([batch]), 1)

    step()
    return step


def step_rows(names: Sequence[str]) -> list[Row]:
    spent = fastest({name: whole_step(name) for name in ("bf16", *names)}, STEP_ROUNDS)
    note = f"{spent['bf16']:.2f} CPU seconds in bf16"
    return [Row(f"step under {n} over bf16", spent[n] / spent["bf16"], "x", "lower", BARS.get(n), note) for n in names]


def rows() -> list[Row]:
    """Emulation cost by recipe, quantising speed, and the outlier study."""
    torch.set_num_threads(1)
    names = [n for n, r in RECIPES.items() if r.quantised]
    found = step_rows(names)
    spent = fastest({"bf16": layer_step(None), **{n: layer_step(numerics(n)) for n in names}})
    found += [Row(f"linear layer under {n} over bf16", spent[n] / spent["bf16"], "x", "lower") for n in names]
    x = torch.randn(2048, 2048).bfloat16()
    speed = fastest({"copy": x.clone, **{n: lambda n=n: quantise(x, numerics(n).x) for n in names}})
    copy = x.numel() * 4 / speed["copy"]
    for n in names:
        moved = x.numel() * (2 + RECIPES[n].operand_bytes)
        rate = moved / speed[n]
        note = f"a copy: {copy / 1e9:.1f} GB/s"
        found.append(Row(f"quantise a bf16 tensor for {n}", rate / 1e9, "GB/s", "higher", note=note))
    errors = down_errors(*amplified_layer(128))
    for key in ("tensor", "row", "block", "mx", "smooth"):
        found.append(Row(f"error at amplification 128, {key}", errors[key], "", "lower"))
    return found


if __name__ == "__main__":
    main(rows)
