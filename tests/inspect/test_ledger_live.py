"""The ledger of steps that torch really runs, with a loss put into each factor.

Seconds come from a simulated device: a dispatch mode below `KernelSample` that advances a clock by what an operator
would cost. So the measurement is the real one, and the expected factors are exact. The last test takes the time of the
real work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_builder import PEAKS, RunBuilder, make_job
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bessemer.core.job import Job
from bessemer.core.resolve import resolve_model
from bessemer.inspect.ledger import FACTORS, Ledger, read_ledger
from bessemer.runtime.kernels import KernelSample, path_of

SEQUENCE, BATCH, STEPS = 16, 2, 5
KERNEL_EFFICIENCY = 0.5
OTHER_OP_S = 2e-9
NOTHING_S = 1e-8  # unix times in floating point are no finer than this over a few steps
aten = torch.ops.aten


def tiny_job() -> Job:
    model = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    return make_job(model=model, data={"seq_len": SEQUENCE}, dp=1, batch=BATCH, train={"micro_batch": BATCH})


class Tiny(nn.Module):
    """One Llama layer and a head; `fallback` names a projection that runs in float32 instead of bfloat16."""

    def __init__(self, job: Job, fallback: str = "") -> None:
        super().__init__()
        spec = resolve_model(job.model)
        self.spec, self.fallback = spec, fallback
        hidden, width, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        sizes = {
            "q": (hidden, width),
            "k": (hidden, kv),
            "v": (hidden, kv),
            "o": (width, hidden),
            "gate": (hidden, spec.ffn_size),
            "up": (hidden, spec.ffn_size),
            "down": (spec.ffn_size, hidden),
            "head": (hidden, spec.vocab_size),
        }
        self.weights = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.embed = nn.Embedding(spec.vocab_size, hidden)

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name != self.fallback):
            return self.weights[name](x.float() if name == self.fallback else x)

    def heads(self, name: str, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.project(name, x_BSD).to(torch.bfloat16).unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embed(tokens_BS).requires_grad_()
        q, k, v = (self.heads(name, x_BSD) for name in "qkv")
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x_BSD = x_BSD + self.project("o", mixed.transpose(1, 2).flatten(2))
        x_BSD = x_BSD + self.project("down", F.silu(self.project("gate", x_BSD)) * self.project("up", x_BSD))
        return F.cross_entropy(self.project("head", x_BSD).float().flatten(0, 1), tokens_BS.flatten())


class Device(TorchDispatchMode):
    """Advances `now` by each operator's cost: FLOPs at half the path's peak, or a constant for all others."""

    def __init__(self, kernel_extra_s: float = 0.0) -> None:
        super().__init__()
        self.now, self.kernel_extra_s, self.kernels = 0.0, kernel_extra_s, 0
        self.counter = KernelSample(clock=lambda: 0.0)  # for its FLOP formulas

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = sum(self.counter.flops.values())
        out = self.counter.__torch_dispatch__(func, (), args, kwargs)
        flops = sum(self.counter.flops.values()) - before
        if flops:
            tensor = next(a for a in args if isinstance(a, torch.Tensor))
            self.now += flops / PEAKS[path_of(tensor.dtype, "cpu")] / KERNEL_EFFICIENCY + self.kernel_extra_s
            self.kernels += 1
        else:
            self.now += OTHER_OP_S
        return out


def train(
    folder: Path,
    model: Tiny,
    clock: Callable[[], float],
    between: Callable[[], None] = lambda: None,
    steps: int = STEPS,
) -> Ledger:
    """A plain training loop that leaves a run folder; every second step is sampled, the second one first."""
    torch.manual_seed(0)
    tokens_BS = torch.randint(0, 64, (BATCH, SEQUENCE))
    builder = RunBuilder(tiny_job(), world_size=1)
    builder.start()
    for number in range(1, steps + 1):
        start = clock()
        sample = KernelSample(clock=clock)
        with sample if number % 2 == 0 else torch.enable_grad():
            loss = model(tokens_BS)
            between()
            loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        step_s = clock() - start
        builder.wait(step_s)
        samples = [(number - 1) * BATCH, number * BATCH]
        builder.metrics.append({"step": number, "samples": samples, "step_s": step_s, "phases": {}, "t": builder.now})
        if number % 2 == 0:
            builder.event("kernels", step=number, flops=sample.flops, kernel_s=sample.kernel_s, step_s=step_s)
    builder.event("finished", step=steps)
    return read_ledger(builder.write(folder))


def simulated(folder: Path, *, fallback: str = "", kernel_extra_s: float = 0.0, between_s: float = 0.0) -> Ledger:
    device = Device(kernel_extra_s)

    def wait() -> None:
        device.now += between_s

    with device:
        return train(folder, Tiny(tiny_job(), fallback), lambda: device.now, wait)


def value(ledger: Ledger, name: str) -> float:
    found = ledger.factors[name].value
    assert found is not None, ledger.factors[name].reason
    return found


def lost_s(ledger: Ledger, name: str) -> float:
    found = ledger.factors[name].lost_s
    assert found is not None
    return found


def moved(healthy: Ledger, ill: Ledger) -> dict[str, float]:
    """Each factor of the ill run over that of the healthy one."""
    return {name: value(ill, name) / value(healthy, name) for name in FACTORS}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return simulated(tmp_path_factory.mktemp("healthy") / "run")


def test_counted_flops_are_the_useful_ones(healthy: Ledger) -> None:
    assert any(note.startswith("counted in 2 sampled steps: 1.0000 x") for note in healthy.notes)
    assert value(healthy, "generality") == 1.0
    assert value(healthy, "effective_compute") == pytest.approx(KERNEL_EFFICIENCY, rel=1e-6)
    assert 0.3 < value(healthy, "node_efficiency") < 0.99


def test_a_float32_fallback_moves_generality(tmp_path: Path, healthy: Ledger) -> None:
    """Kernels take longer and the rest of the step doesn't, so the node loses the same seconds as before (within
    3 % of what was injected: without the conversions to bfloat16 there are a few operators less)."""
    ill = simulated(tmp_path / "run", fallback="head")
    tokens, spec = BATCH * SEQUENCE, resolve_model(tiny_job().model)
    share = 3 * 2 * tokens * spec.hidden_size * spec.vocab_size / ((ill.useful_flops or 0) / STEPS)
    slower = 1 - share + share * PEAKS["bf16"] / PEAKS["fp32"]
    found = moved(healthy, ill)
    assert found["generality"] == pytest.approx(1 / slower, rel=0.001)
    assert found["effective_compute"] == pytest.approx(1, rel=0.001)
    assert found["cluster_efficiency"] == 1
    injected_s = ill.wall.committed_s - healthy.wall.committed_s
    assert lost_s(ill, "node_efficiency") == pytest.approx(lost_s(healthy, "node_efficiency"), abs=0.03 * injected_s)
    assert lost_s(ill, "stability") == pytest.approx(lost_s(healthy, "stability"), abs=NOTHING_S)


def test_a_slower_kernel_moves_effective_compute(tmp_path: Path, healthy: Ledger) -> None:
    kernels = 8 + 16 + 2  # products forward and backward, attention forward and backward
    useful_s = (healthy.useful_flops or 0) / STEPS / PEAKS["bf16"]
    extra_s = useful_s / KERNEL_EFFICIENCY / kernels  # doubles the time in kernels
    ill = simulated(tmp_path / "run", kernel_extra_s=extra_s)
    found = moved(healthy, ill)
    assert found["effective_compute"] == pytest.approx(0.5, rel=0.001)
    assert found["generality"] == 1
    gained_s = lost_s(ill, "effective_compute") - lost_s(healthy, "effective_compute")
    assert gained_s == pytest.approx(STEPS * kernels * extra_s, rel=0.001)
    assert lost_s(ill, "node_efficiency") == pytest.approx(lost_s(healthy, "node_efficiency"), rel=0.001)
    assert lost_s(ill, "stability") == pytest.approx(lost_s(healthy, "stability"), abs=NOTHING_S)


def test_time_between_kernels_moves_node_efficiency(tmp_path: Path, healthy: Ledger) -> None:
    step_s = healthy.wall.committed_s / STEPS
    ill = simulated(tmp_path / "run", between_s=step_s)
    found = moved(healthy, ill)
    assert found["node_efficiency"] == pytest.approx(0.5, rel=0.001)
    assert {found[name] for name in ("generality", "cluster_efficiency")} == {1}
    assert found["effective_compute"] == pytest.approx(1, rel=0.001)
    assert lost_s(ill, "stability") == pytest.approx(lost_s(healthy, "stability"), abs=NOTHING_S)


class Slowed(TorchDispatchMode):
    """Real time of this thread's own work, and above it what is added in each product and by `add`.

    The thread's CPU time and not the wall clock, so that other work on the machine changes nothing.
    """

    def __init__(self, kernel_s: float) -> None:
        super().__init__()
        self.kernel_s, self.in_kernels, self.beside = kernel_s, 0.0, 0.0

    def add(self, seconds: float) -> None:
        self.beside += seconds

    def clock(self) -> float:
        return time.thread_time() + self.in_kernels + self.beside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is aten.mm:
            self.in_kernels += self.kernel_s
        return func(*args, **(kwargs or {}))


def test_on_a_real_clock(tmp_path: Path) -> None:
    """Delays long against all else that a step does, inside the kernels and between them."""
    slowed, model = Slowed(kernel_s=0.5), Tiny(tiny_job())
    with slowed:
        ledger = train(tmp_path / "run", model, slowed.clock, lambda: slowed.add(6.0), steps=2)
    kernel_s, step_s = slowed.in_kernels / 2, (slowed.in_kernels + slowed.beside) / 2
    assert kernel_s == 0.5 * 24
    assert value(ledger, "node_efficiency") == pytest.approx(kernel_s / step_s, rel=0.03)
    useful_s = (ledger.useful_flops or 0) / 2 / PEAKS["bf16"]
    assert value(ledger, "effective_compute") == pytest.approx(useful_s / kernel_s, rel=0.03)
    assert value(ledger, "generality") == 1
