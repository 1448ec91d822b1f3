"""Machines: the packaged figures, files of one's own, and the errors of a wrong name or file."""

import pytest

from bessemer.core.errors import ConfigError
from bessemer.core.machine import DTYPES, Machine, cpu_local_file, load_machine, machine_names

DESIGN = [
    "cpu-local",
    "a100-40gb",
    "a100-80gb",
    "h100",
    "h200",
    "h800",
    "b200",
    "gb200",
    "gb300",
    "mtt-s4000",
    "mtt-s5000",
]


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


@pytest.mark.parametrize("name", machine_names())
def test_each_named_machine_loads_and_survives_toml(name, cache):
    machine = load_machine(name, cache=cache)
    assert machine.name == name
    assert Machine.from_toml(machine.to_toml(), "text") == machine


def test_the_names_of_the_design_are_there():
    assert set(DESIGN) <= set(machine_names())


def test_published_figures_have_the_right_unit():
    h100 = load_machine("h100")
    assert h100.peak("bf16") == 989.4e12
    assert h100.peak("fp8") == 1978.9e12
    assert h100.scaleup_bytes_per_s == 450e9  # vendors print 900 GB/s for both directions
    assert h100.nic_bytes_per_s == 400e9 / 8  # network cards are sold in bits
    assert h100.memory_bytes == 80 * 10**9
    assert load_machine("a100-80gb").peak("fp8") is None  # no such units
    assert load_machine("b200").limit_bytes == 179 * 10**9 < load_machine("b200").memory_bytes


def test_what_no_source_gives_is_absent():
    assert load_machine("gb300").memory_bytes is None
    assert load_machine("h800").peak("bf16") is None
    assert load_machine("mtt-s5000").peak("bf16") is None


def test_every_figure_has_an_origin():
    for name in machine_names():
        machine = load_machine(name)
        assert set(machine.origins) <= {*Machine.model_fields, *(f"peak_flops_per_s.{d}" for d in DTYPES)}
    assert load_machine("gb200").origin_of("peak_flops_per_s.bf16").source.startswith("github.com/NVIDIA")
    assert load_machine("gb200").origin_of("memory_bytes").kind == "published"


def test_cpu_local_reads_memory_now_and_peaks_from_the_measured_file(cache):
    bare = load_machine("cpu-local", cache=cache)
    assert bare.memory_bytes > 2**28
    assert bare.peak("bf16") is None
    measured = bare.model_copy(update={"peak_flops_per_s": bare.peak_flops_per_s.model_copy(update={"bf16": 1.2e12})})
    file = cpu_local_file(cache)
    file.parent.mkdir(parents=True)
    file.write_text(measured.to_toml())
    assert load_machine("cpu-local", cache=cache).peak("bf16") == 1.2e12


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "node.toml"
    path.write_text(load_machine("h200").to_toml().replace('"h200"', '"lab"'))
    assert load_machine(str(path)).name == "lab"


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [("h10", "machine-unknown", "h100"), ("B200", "machine-unknown", "b200"), ("no/such.toml", "machine-file", "h100")],
)
def test_unknown_machine_names_what_would_work(name, code, text):
    with pytest.raises(ConfigError) as caught:
        load_machine(name)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert problem.where == "machine.name"
    assert text in problem.fix


def test_every_wrong_key_of_a_file_is_reported(tmp_path):
    path = tmp_path / "m.toml"
    path.write_text(
        'name = "m"\ndevice = "cuda"\nmemory_byte = 5\n[peak_flops_per_s]\nbf15 = 1.0\nfp8 = -1.0\n'
        '[origin]\nkind = "published"\nsource = "s"\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_machine(str(path))
    fixes = " ".join(p.fix for p in caught.value.problems)
    assert len(caught.value.problems) == 3
    assert "memory_bytes" in fixes
    assert "bf16" in fixes
    path.write_text("name = ")
    with pytest.raises(ConfigError, match="not TOML"):
        load_machine(str(path))


def test_unknown_dtype_is_an_error_not_a_default():
    with pytest.raises(KeyError, match="fp8"):
        load_machine("h100").peak("fp7")
