"""The Triton kernels without a GPU: their numbers in the interpreter, their machine code for Hopper."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from bessemer.core.errors import RequestError
from bessemer.ops import triton as triton_ops

if TYPE_CHECKING:
    from bessemer.ops.triton.ahead import Built

needs_triton = pytest.mark.skipif(bool(triton_ops.why_absent()), reason=triton_ops.why_absent())
VARIANTS: list[str] = []
if not triton_ops.why_absent():
    from bessemer.ops.triton import ahead

    VARIANTS = list(ahead.VARIANTS)


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=110, check=False
    )


def test_without_triton_the_package_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "from bessemer.core.errors import RequestError\n"
        "from bessemer.ops import triton\n"
        "assert triton.why_absent()\n"
        "try: triton.kernels()\n"
        "except RequestError as error: print(error.code, error.fix)\n"
    )
    done = _python("-c", script)
    assert done.stdout.strip() == f"triton-missing {triton_ops.INSTALL}", done.stdout + done.stderr


@needs_triton
@pytest.mark.slow
def test_the_numbers_in_the_interpreter() -> None:
    """All of `triton_interpreted.py`, none of it skipped, in a process in which Triton interprets."""
    cases = Path(__file__).with_name("triton_interpreted.py")
    expected = len(re.findall(r"^def test_", cases.read_text(encoding="utf-8"), flags=re.MULTILINE))
    done = _python("-m", "pytest", str(cases), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"^(\d+) passed in", done.stdout, flags=re.MULTILINE)
    assert passed and int(passed[1]) >= expected, done.stdout[-2000:]


@needs_triton
def test_tensors_on_the_cpu_are_refused() -> None:
    launch = triton_ops.kernels()
    with pytest.raises(RequestError, match="CUDA devices, not on cpu"):
        launch.quantise_blocks(torch.zeros(128, 128), launch.Quantising())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Built]]:
    """What has been compiled so far; each kernel is by the first test that asks."""
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    yield {}
    del os.environ["TRITON_CACHE_DIR"]


def _build(built: dict[str, Built], name: str) -> Built:
    if name not in built:
        built[name] = ahead.build(ahead.VARIANTS[name])
    return built[name]


@needs_triton
@pytest.mark.parametrize("name", VARIANTS)
def test_machine_code_for_hopper(name: str, built: dict[str, Built]) -> None:
    """Nothing spills, two programs of a quantising kernel or one of 16 warps fit a processor, casts are the hardware's
    saturating ones, and no instruction flushes subnormal numbers."""
    variant, made = ahead.VARIANTS[name], _build(built, name)
    assert made.stack_bytes == 0 and made.count(r"(LDL|STL).*") == 0
    assert made.shared_bytes <= ahead.SHARED_LIMIT
    assert made.registers * 32 * variant.warps <= 65536
    assert ".ftz" not in made.ptx
    if name.startswith(("product", "experts")):
        return
    assert "cvt.rn.satfinite.e5m2x2" in made.ptx if "e5m2" in name else "cvt.rn.satfinite.e4m3x2" in made.ptx
    assert made.count(r"LDG\.E\.128") > 0 and made.count(r"STG\.E\.128") > 0  # 16 bytes a thread
    resident = 65536 // (made.registers * 32 * variant.warps) * variant.warps
    assert resident >= (8 if "any scale" in name else 16)


@needs_triton
@pytest.mark.parametrize("name", [n for n in VARIANTS if n.startswith(("product", "experts"))])
def test_products_use_the_tensor_cores_and_promote(name: str, built: dict[str, Built]) -> None:
    """FP8 tensor-core instructions of 32 of K, four for a block of 128; then every element of the accumulator gets one
    multiply-add in float32; tiles come by the copy engine."""
    variant, made = ahead.VARIANTS[name], _build(built, name)
    left = "e5m2" if "e5m2" in name else "e4m3"
    rows, cols = variant.constants["BLOCK_M"], variant.constants["BLOCK_N"]
    assert f"wgmma.mma_async.sync.aligned.m64n{cols}k32.f32.{left}.e4m3" in made.ptx
    warpgroups = variant.warps // 4
    assert made.count(rf"QGMMA\.64x{cols}x32\.F32\.{left.upper()}\.E4M3") == 128 // 32 * (rows // 64) // warpgroups
    assert made.count("FFMA") == rows * cols // (32 * variant.warps)
    assert made.count(r"UTMALDG\.2D.*") >= 2 and made.count("HGMMA.*|HMMA.*") == 0


@needs_triton
def test_what_is_started_compiles(monkeypatch: pytest.MonkeyPatch, built: dict[str, Built]) -> None:
    """Every function of `launch` as a Hopper GPU would start it, up to the start itself: Triton takes the arguments,
    specialises the kernel for them (sizes of 1, and those that are no multiples of 16, differ) and compiles it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Hopper:
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", ahead.HOPPER, 32))

    started = []

    def start(kernel: JITFunction, grid: tuple[int, ...]) -> object:
        def compiled(*arguments: object, **constants: object) -> None:
            made = kernel.run(*arguments, grid=grid, warmup=True, **constants)
            started.append((made.metadata.num_warps, "wgmma.mma_async" in made.asm["ptx"]))

        return compiled

    launch = triton_ops.kernels()
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    monkeypatch.setattr(JITFunction, "__getitem__", start)
    monkeypatch.setattr(launch, "runs_on", lambda device: True)
    how = launch.Quantising(multiple=16)
    for shape in ((256, 512), (1, 16), (1, 1), (100, 72)):
        for square in (False, True):
            launch.quantise_blocks(torch.zeros(shape, dtype=torch.bfloat16), how, square=square)
    gate_up, grad = torch.zeros(64, 512, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.bfloat16)
    for smooth in (None, torch.ones(256)):
        launch.swiglu_blocks(gate_up, how, smooth)
        launch.swiglu_backward_blocks(grad, gate_up, how, smooth)
    assert started == [(8, False)] * 8 + [(16, False)] * 4
    (x_rows, x_cols), (w_rows, w_cols) = (
        launch.quantise_blocks(torch.zeros(512, 256), how, square=square) for square in (False, True)
    )
    one = launch.quantise_blocks(torch.zeros(1, 256), how)[0]
    del started[:]
    launch.multiply(one, w_rows, bias_N=torch.zeros(512, dtype=torch.bfloat16))
    launch.multiply(x_cols, x_cols, torch.float32)
    for ends in (torch.tensor([128, 512], dtype=torch.int32), torch.tensor([512], dtype=torch.int32)):
        launch.multiply_rows(x_rows, w_rows, ends, (512 // len(ends), 0))
        launch.multiply_rows(x_rows, w_cols, ends, (0, 512 // len(ends)))
        launch.multiply_sums(x_cols, x_cols, ends)
    assert started == [(4, True)] * 8


@needs_triton
def test_the_product_compiles_for_blackwell(built: dict[str, Built]) -> None:
    made = ahead.build(ahead.VARIANTS["product 128x128"], capability=100)
    assert "tcgen05.mma" in made.ptx and "kind::f8f6f4" in made.ptx and made.stack_bytes == 0
