"""What emulating each recipe costs on a CPU, and how fast it quantises.

    python bench/precision.py [--json]

Forward and backward of one linear layer (1024 tokens, 512 inputs, 1536 outputs, bf16 around float32 masters) under each
recipe beside the plain bf16 layer; a whole step has attention, norms and an optimizer besides, so its ratio is lower.
One thread, CPU seconds, interleaved, the fastest of each counts. The outliers' errors are those of docs/precision.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from table import Row, main
from torch import Tensor

from bessemer import ops
from bessemer.core.recipes import RECIPES
from bessemer.precision import Call, Numerics, keyed_generator, numerics, quant_linear, quantise
from bessemer.precision.outliers import amplified_layer, down_errors

TOKENS, INPUTS, OUTPUTS = 1024, 512, 1536
ROUNDS = 7
BARS = {"fp8-delayed": 1.4, "fp8-current": 1.4, "fp8-block128": 1.8}


def fastest(work: dict[str, Callable[[], object]]) -> dict[str, float]:
    """CPU seconds of the fastest of ROUNDS interleaved calls of each."""
    best = dict.fromkeys(work, float("inf"))
    for _ in range(ROUNDS):
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


def rows() -> list[Row]:
    """Emulation cost by recipe, quantising speed, and the outlier study."""
    torch.set_num_threads(1)
    names = [n for n, r in RECIPES.items() if r.quantised]
    spent = fastest({"bf16": layer_step(None), **{n: layer_step(numerics(n)) for n in names}})
    found = [
        Row(f"linear layer under {n} over bf16", spent[n] / spent["bf16"], "x", "lower", BARS.get(n)) for n in names
    ]
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
