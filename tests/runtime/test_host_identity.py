"""What tells processors of one name apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from bessemer.runtime.host import cpu_identity

INFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: {family}
model\t\t: 17
model name\t: AMD EPYC
stepping\t: 1
flags\t\t: fpu sse2 {flags}

processor\t: 1
flags\t\t: other
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


def identity(folder: Path, *, family: int = 25, flags: str = "fma avx2 avx512f", l2: str = "1024K") -> str:
    (folder / "cpuinfo").write_text(INFO.format(family=family, flags=flags))
    for index, (kind, size) in enumerate([("Data", "32K"), ("Instruction", "64K"), ("Unified", l2)]):
        (folder / f"index{index}").mkdir(exist_ok=True)
        (folder / f"index{index}" / "type").write_text(kind + "\n")
        (folder / f"index{index}" / "size").write_text(size + "\n")
    return cpu_identity(folder / "cpuinfo", folder)


def test_an_identity_is_of_the_first_processor(tmp_path: Path) -> None:
    found = identity(tmp_path)
    assert found.startswith("25/17/1 ") and found.endswith(" 32K/1024K")
    assert identity(tmp_path) == found


@pytest.mark.parametrize(
    "other", [{"family": 26}, {"flags": "fma avx2"}, {"flags": "fma avx2 avx512f avx512_bf16"}, {"l2": "2048K"}]
)
def test_processors_that_may_add_in_another_order_differ(tmp_path: Path, other: dict[str, object]) -> None:
    (tmp_path / "other").mkdir()
    assert identity(tmp_path) != identity(tmp_path / "other", **other)  # type: ignore[arg-type]


def test_what_only_the_kernel_lists_makes_no_difference(tmp_path: Path) -> None:
    known = identity(tmp_path)
    assert identity(tmp_path, flags="avx512f user_shstk avx2 fma ibpb_exit_to_user") == known


def test_other_kinds_of_processors_and_hosts_without_such_files(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(ARM)
    assert cpu_identity(tmp_path / "cpuinfo", tmp_path).startswith("0x41/0xd40 ")
    assert cpu_identity(tmp_path / "none", tmp_path / "none").endswith(" no caches")
    assert len(cpu_identity().split()) == 3
