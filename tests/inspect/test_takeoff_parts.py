"""The parts of take-off that need no second rank: rounds, blame, history and quarantine, what a host's files say."""

from __future__ import annotations

import ctypes
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from takeoff_fleets import fleet, slower, with_rank

from bessemer.core.errors import DataError
from bessemer.inspect import takeoff_local
from bessemer.inspect.takeoff_compare import blame, low_outliers, majority
from bessemer.inspect.takeoff_history import (
    History,
    checksums_after,
    host_lines,
    read_checksums,
    standing,
    write_checksums,
)
from bessemer.inspect.takeoff_patrol import Rule, out_of_service, slower_than_before
from bessemer.inspect.takeoff_records import Hello, RankState
from bessemer.inspect.takeoff_rounds import partners, rounds, sample
from bessemer.inspect.takeoff_rules import Floors, judge
from bessemer.inspect.takeoff_verdict import Finding
from bessemer.inspect.takeoff_worker import _leader
from bessemer.runtime.device import Cpu
from bessemer.runtime.disk import measure_disk, nearest_folder
from bessemer.runtime.known_answer import Burner
from bessemer.runtime.links import Link, read_links
from bessemer.runtime.nvml import read_gpus

# ---- who meets whom


@pytest.mark.parametrize("count", range(1, 14))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(count: int) -> None:
    made = rounds(count)
    assert sorted(pair for one in made for pair in one) == list(itertools.combinations(range(count), 2))
    assert len(made) == (0 if count == 1 else count - 1 + count % 2)
    for one in made:
        ranks = [rank for pair in one for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_hosts_meet_by_local_rank_and_ranks_of_a_host_among_themselves() -> None:
    hosts = [(0, 1), (2, 3), (4, 5)]
    made, taken = partners(hosts, most=64)
    pairs = {(a, b) for one in made for a, b in one.items() if a < b}
    assert pairs == {(0, 2), (0, 4), (2, 4), (1, 3), (1, 5), (3, 5), (0, 1), (2, 3), (4, 5)} and taken == (3, 3)
    assert all(one[one[rank]] == rank for one in made for rank in one)
    _, taken = partners([(host,) for host in range(100)], most=10)
    assert taken == (10, 99)


def test_a_sample_is_spread() -> None:
    assert sample(3, 5) == [0, 1, 2] and sample(100, 4) == [0, 25, 50, 75]


# ---- comparing


def test_nothing_is_said_of_two() -> None:
    assert low_outliers({"a": 1.0, "b": 0.1}, 0.05) == {}
    assert list(low_outliers({"a": 1.0, "b": 0.1, "c": 1.0}, 0.05)) == ["b"]


def test_a_wide_spread_hides_what_a_narrow_one_shows() -> None:
    narrow = {str(n): 1.0 + n % 5 / 1000 for n in range(20)} | {"low": 0.9}
    wide = {str(n): 1.0 + (n % 5 - 2) / 20 for n in range(20)} | {"low": 0.9}
    assert list(low_outliers(narrow, 0.05)) == ["low"] and not low_outliers(wide, 0.05)
    assert not low_outliers({**narrow, "low": 0.97}, 0.05), "far out, and still within 5 %"


def test_majority_is_more_than_half() -> None:
    assert majority({1: "a", 2: "a", 3: "b"}) == "a" and majority({1: "a", 2: "b"}) is None and majority({}) is None


def test_blame_takes_the_end_that_explains_most() -> None:
    links = list(itertools.combinations(range(6), 2))
    assert blame([link for link in links if 2 in link], links) == ({2: 5}, [])
    assert blame([(1, 4)], links) == ({}, [(1, 4)])
    slow = [link for link in links if 2 in link] + [(0, 4)]
    assert blame(slow, links) == ({2: 5}, [(0, 4)])
    assert blame([(0, 1), (0, 2)], links) == ({}, [(0, 1), (0, 2)]), "two of five are not the card"


# ---- history


def test_quarantine_and_release() -> None:
    def after(results: str) -> str:
        words = {".": False, "x": True, "W": None}
        return standing([words[letter] for letter in results], bad=2, good=3)

    assert after("") == after("....") == after("x") == after("x...x") == "in service"
    assert after("xx") == after("x..x") == after("..x.x") == "quarantined", "two of the last four"
    assert after("W") == after("...W..") == "quarantined", "wrong answers need no second time"
    assert after("xx..") == after("xx..x..") == "quarantined"
    assert after("xx...") == after("W...") == "in service"
    assert after("xx...x") == "in service", "what was before a release is forgotten"


def test_the_history_of_a_patrol(tmp_path: Path) -> None:
    history, rule = History(tmp_path / "hosts"), Rule(bad=2, good=2)
    hosts = [state.host for state in fleet(4).hosts]
    out = []
    for round_, failing in enumerate((None, "rate", "rate", None, None)):
        findings = [] if failing is None else [Finding("node002", failing, True, "slow")]
        history.append(host_lines(fleet(4, seed=round_), findings, t=float(round_)))
        out.append(out_of_service(history, hosts, rule))
    assert out == [[], [], ["node002"], ["node002"], []]
    lines = history.lines("node002")
    assert [line.bad for line in lines] == [False, True, True, False, False] and lines[1].what == ["rate: slow"]
    with (tmp_path / "hosts" / "node001.jsonl").open("a") as file:
        file.write('{"t": 1.0, "host"')  # a torn last line of a patrol that was killed
    assert len(history.lines("node001")) == 5
    (tmp_path / "hosts" / "node001.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(DataError, match="none of a take-off check"):
        history.lines("node001")


def test_a_host_is_compared_with_its_own_past(tmp_path: Path) -> None:
    history = History(tmp_path)
    for seed in range(5):
        assert not slower_than_before(with_rank(fleet(2), 1, slower(0.8)), history), "too little is known"
        history.append(host_lines(fleet(2, seed=seed), [], t=float(seed)))
    (finding,) = slower_than_before(with_rank(fleet(2, seed=9), 1, slower(0.85)), history)
    assert finding.host == "node001" and finding.bad and "of its own median" in finding.what
    assert not slower_than_before(with_rank(fleet(2, seed=9), 1, slower(0.95)), history)


def test_checksums_are_kept_and_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "takeoff" / "checksums.json"
    assert read_checksums(file) == {}
    write_checksums(file, checksums_after(fleet(2), {}), ["node000"])
    known = read_checksums(file)
    assert len(known) == 4 and set(known.values()) == {f"{n}-0123456789" for n in ("fp32", "bf16", "fp16", "fp8")}
    first = next(iter(known))
    write_checksums(file, {first: "other", "new": "1"}, ["node001"])
    assert read_checksums(file) == {**known, "new": "1"}
    assert checksums_after(fleet(2), {first: "before"})[first] == "before"
    file.write_text("[1]")
    with pytest.raises(DataError) as caught:
        read_checksums(file)
    assert caught.value.code == "takeoff-history" and "rm " in caught.value.fix


def test_unlike_devices_of_one_name_share_no_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual machines call different processors alike; another instruction set adds in another order."""
    burner = Burner("fp32", Cpu(), 16)
    for name in takeoff_local._CHOOSING:
        monkeypatch.delenv(name, raising=False)
    keys = [takeoff_local._key(Cpu(), burner)]
    monkeypatch.setattr(takeoff_local, "cpu_identity", lambda: "26/2/1 01234567 48K/1024K")
    keys.append(takeoff_local._key(Cpu(), burner))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    keys.append(takeoff_local._key(Cpu(), burner))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    keys.append(takeoff_local._key(Cpu(), burner))
    monkeypatch.setattr(torch, "__version__", "3.0")
    keys.append(takeoff_local._key(Cpu(), burner))
    assert len(set(keys)) == 5 and all(key.startswith(f"fp32 16 on {Cpu().name} (") for key in keys)
    assert "26/2/1" in keys[-1] and "threads 77" in keys[-1] and "ONEDNN_MAX_CPU_ISA=AVX2" in keys[-1]


def test_answers_are_compared_among_like_devices_alone() -> None:
    """Nor is what another kind answered before held against them."""

    def other(state: RankState) -> RankState:
        products = tuple(
            p.model_copy(update={"key": f"{p.key}, other", "checksum": f"{p.checksum}-2"}) for p in state.products
        )
        return state.model_copy(update={"products": products})

    mixed = with_rank(fleet(4), 3, other)
    stored = checksums_after(mixed, {})
    assert len(stored) == 8
    assert not [f for f in judge(mixed, stored, Floors()) if f.check == "answer"]


def test_two_answers_are_not_stored() -> None:
    two = fleet(2)
    products = (two.ranks[1].products[0].model_copy(update={"checksum": "dead"}), *two.ranks[1].products[1:])
    two = with_rank(two, 1, lambda state: state.model_copy(update={"products": products}))
    assert two.ranks[0].products[0].key not in checksums_after(two, {})


# ---- what the host's files say


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


TREE = {
    "bus/pci/devices/0000:1b:00.0/class": "0x030200",
    "bus/pci/devices/0000:1b:00.0/vendor": "0x10de",
    "bus/pci/devices/0000:1b:00.0/device": "0x2330",
    "bus/pci/devices/0000:1b:00.0/current_link_speed": "32.0 GT/s PCIe",
    "bus/pci/devices/0000:1b:00.0/max_link_speed": "32.0 GT/s PCIe",
    "bus/pci/devices/0000:1b:00.0/current_link_width": "8",
    "bus/pci/devices/0000:1b:00.0/max_link_width": "16",
    "bus/pci/devices/0000:1b:00.0/aer_dev_fatal": "DLP 0\nSDES 1\nTOTAL_ERR_FATAL 1",
    "bus/pci/devices/0000:1b:00.0/aer_dev_nonfatal": "DLP 0\nTOTAL_ERR_NONFATAL 2",
    "bus/pci/devices/0000:00:1f.0/class": "0x060100",  # a bridge: of no interest
    "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
    "class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp",
    "class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
    "class/infiniband/mlx5_0/ports/1/counters/symbol_error": "0",
    "class/infiniband/mlx5_0/ports/1/counters/link_downed": "3",
    "devices/pci0000:00/0000:18:00.0/net/ens1/operstate": "up",
    "devices/pci0000:00/0000:18:00.0/net/ens1/speed": "100000",
    "devices/pci0000:00/0000:18:00.0/net/ens1/mtu": "9000",
    "devices/pci0000:00/0000:19:00.0/net/ens2/operstate": "down",
    "devices/pci0000:00/0000:19:00.0/net/ens2/speed": "-1",
    "devices/virtual/net/lo/operstate": "unknown",
}
"""As Linux lays sysfs out on a host with an H100 and a ConnectX-7 (made after the kernel's ABI documents)."""


def test_links_of_a_sysfs_tree(tmp_path: Path) -> None:
    root = _tree(tmp_path, TREE)
    (root / "class" / "net").mkdir()
    for name in ("pci0000:00/0000:18:00.0/net/ens1", "pci0000:00/0000:19:00.0/net/ens2", "virtual/net/lo"):
        (root / "class" / "net" / Path(name).name).symlink_to(root / "devices" / name)
    pci, ens1, ens2, port = read_links(root)
    assert pci == Link("pci", "0000:1b:00.0", {
        "role": "gpu", "device": "0x10de:0x2330", "speed": "32.0 GT/s PCIe", "most_speed": "32.0 GT/s PCIe",
        "width": "8", "most_width": "16", "errors": "3",
    })  # fmt: skip
    assert ens1 == Link("net", "ens1", {"state": "up", "mbit_per_s": "100000", "mtu": "9000"})
    assert ens2 == Link("net", "ens2", {"state": "down"}), "a card that is down has no speed"
    assert port.name == "mlx5_0/1" and port.fields["state"] == "ACTIVE" and port.fields["physical"] == "LinkUp"
    assert port.fields["rate"] == "400 Gb/sec (4X NDR)" and port.fields["losses"] == "3"
    assert read_links(tmp_path / "nothing") == []


class _Library:
    """In the place of libnvidia-ml: three GPUs, of which the second has fallen off the bus and the third is another
    job's."""

    def __init__(self) -> None:
        self.values = {
            "nvmlDeviceGetTemperature": 64, "nvmlDeviceGetTotalEccErrors": 2,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40, "nvmlDeviceGetCurrPcieLinkWidth": 16,
        }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "nvmlDeviceGetCount_v2":
                arguments[0]._obj.value = 3
            elif name == "nvmlDeviceGetHandleByIndex_v2":
                return (0, 15, 4)[arguments[0]]  # NVML_ERROR_GPU_IS_LOST, NVML_ERROR_NO_PERMISSION
            elif name == "nvmlDeviceGetNvLinkState":
                if arguments[1] >= 4:
                    return 3  # NVML_ERROR_NOT_SUPPORTED
                arguments[-1]._obj.value = int(arguments[1] != 2)
            elif name.startswith("nvmlDevice"):
                if name not in self.values:
                    return 3
                arguments[-1]._obj.value = self.values[name]
                assert isinstance(arguments[-1]._obj, ctypes.c_uint | ctypes.c_ulonglong)
            return 0

        return call


def test_gpus_of_the_drivers_library() -> None:
    first, second, third = read_gpus(_Library())
    assert first == {"index": 0, "temperature_c": 64, "ecc_uncorrected": 2, "slowdowns": 64, "pcie_width": 16,
                     "nvlinks_up": 3, "nvlinks": 4}  # fmt: skip
    assert second == {"index": 1, "lost": 1} and third == {"index": 2}


def test_a_disk_is_measured_where_the_folder_will_be(tmp_path: Path) -> None:
    assert nearest_folder(tmp_path / "runs" / "small") == tmp_path
    disk = measure_disk(tmp_path / "runs" / "small", 1 << 20)
    assert disk.folder == str(tmp_path) and disk.write_bytes_per_s > 0 and disk.fsync_s > 0 and not disk.fault
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_folder_that_takes_nothing_is_a_finding() -> None:
    disk = measure_disk(Path("/proc"), 1 << 20)
    assert disk.fault and disk.write_bytes_per_s == 0.0


def test_records_survive_json() -> None:
    whole = fleet(3, ranks=2)
    assert type(whole).model_validate_json(whole.model_dump_json()) == whole
    assert json.loads(whole.model_dump_json())["rounds"] == [3, 3]


def test_ranks_dealt_to_hosts_in_turn_stay_with_their_host() -> None:
    dealt = {0: ("a", 0), 1: ("b", 0), 2: ("a", 1), 3: ("b", 1)}
    in_a_row = {0: ("a", 0), 1: ("a", 1), 2: ("b", 0), 3: ("b", 1)}
    same_name = {0: ("a", 0), 1: ("a", 1), 2: ("a", 0), 3: ("a", 1)}  # as in tests: two hosts of one name
    for ranks, leaders in ((dealt, [0, 1, 0, 1]), (in_a_row, [0, 0, 2, 2]), (same_name, [0, 0, 2, 2])):
        hello = {rank: Hello(rank=rank, local_rank=local, name=name) for rank, (name, local) in ranks.items()}
        assert [_leader(rank, hello) for rank in hello] == leaders
