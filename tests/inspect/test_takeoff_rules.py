"""The rules of take-off on simulated fleets: each fault is named with its host, and sound fleets raise no alarm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from takeoff_fleets import GIB, RATES, VERSIONS, fleet, slower, with_host, with_rank, with_slow_links

from bessemer.inspect.takeoff_records import Collective, Fleet, LinkState, MemoryState, RankState
from bessemer.inspect.takeoff_rules import Floors, judge, needed_files
from bessemer.inspect.takeoff_verdict import Finding, verdict_of

HOSTS, BAD = 200, 77
NAME = f"node{BAD:03d}"
GPU = {"index": 3, "nvlinks_up": 18, "ecc_uncorrected": 2}
HOT = {"index": 0, "slowdowns": 0x40, "temperature_c": 91}


def found(of: Fleet, stored: dict[str, str] | None = None, floors: Floors | None = None) -> list[Finding]:
    return judge(of, stored or {}, floors or Floors())


def bad(of: Fleet) -> set[tuple[str, str]]:
    return {(finding.host, finding.check) for finding in found(of) if finding.bad}


def _answer(**update: object) -> Callable[[RankState], RankState]:
    def change(state: RankState) -> RankState:
        first, *others = state.products
        return state.model_copy(update={"products": (first.model_copy(update=update), *others)})

    return change


def _hot(state: RankState) -> RankState:
    products = tuple(p.model_copy(update={"rate_end": 0.8 * p.rate_start}) for p in state.products)
    return state.model_copy(update={"products": products})


def _versions(**change: str) -> Callable[[RankState], RankState]:
    return lambda state: state.model_copy(update={"versions": {**VERSIONS, **change}})


def _memory(**update: object) -> Callable[[RankState], RankState]:
    return lambda state: state.model_copy(update={"memory": state.memory.model_copy(update=update)})


def _disk(of: Fleet, **update: object) -> Fleet:
    return with_host(of, BAD, disks=(of.hosts[BAD].disks[0].model_copy(update=update),))


def _port(of: Fleet, **fields: str) -> Fleet:
    pci, port = of.hosts[BAD].links
    return with_host(of, BAD, links=(pci, port.model_copy(update={"fields": {**port.fields, **fields}})))


def _narrow(of: Fleet) -> Fleet:
    pci, port = of.hosts[BAD].links
    return with_host(of, BAD, links=(pci.model_copy(update={"fields": {**pci.fields, "width": "8"}}), port))


FAULTS: dict[str, tuple[str, str, Callable[[Fleet], Fleet]]] = {
    # name: check, words of the evidence, the fault
    "10 % slower": ("rate", "products at 0.9", lambda f: with_rank(f, BAD, slower(0.9))),
    "one format slower": ("rate", "fp32 0.50", lambda f: with_rank(f, BAD, _answer(rate=0.5 * RATES["fp32"]))),
    "a flipped bit once": ("answer", "repetition 7 differs", lambda f: with_rank(f, BAD, _answer(
        fault="repetition 7 differs from the first at [3, 4]: 0x3f800000 instead of 0x3f800001"))),
    "a stuck bit": ("answer", "not fp32-0123456789 as most", lambda f: with_rank(f, BAD, _answer(checksum="dead"))),
    "hot": ("heat", "fell by 20%", lambda f: with_rank(f, BAD, _hot)),
    "slow memory": ("memory", "copies at 0.6", lambda f: with_rank(f, BAD, _memory(copy_bytes_per_s=1.8e12))),
    "bad memory": ("memory", "byte 0x1a40", lambda f: with_rank(f, BAD, _memory(fault="zeros: byte 0x1a40 ..."))),
    "another library": ("version", "nccl 2.29.2, not 2.30.7", lambda f: with_rank(f, BAD, _versions(nccl="2.29.2"))),
    "another job": ("version", "job ffff, not 0123", lambda f: with_rank(f, BAD, _versions(job="ffff"))),
    "clock skew": ("clock", "2.50 s (+- 20.0 us) ahead", lambda f: with_host(f, BAD, clock_s=2.5)),
    "a full disk": ("disk", "100 GiB free, the job will write 200 GiB", lambda f: _disk(f, free_bytes=100 * GIB)),
    "a slow disk": ("disk", "of the fleet's median", lambda f: _disk(f, write_bytes_per_s=2e8)),
    "a read-only disk": ("disk", "Read-only file system", lambda f: _disk(f, fault="Read-only file system")),
    "few open files": ("limit", "1024 open files", lambda f: with_host(f, BAD, limits={"open_files": 1024})),
    "few ports": ("limit", "by 100 ports only", lambda f: with_host(f, BAD, limits={"ports": 100})),
    "little locked memory": ("limit", "ulimit -l", lambda f: with_host(f, BAD, limits={"locked_bytes": 65536})),
    "a slow card": ("pair", "of its 4 links", lambda f: with_slow_links(f, 0.5, lambda p: BAD in (p.a, p.b))),
    "a port that is down": ("link", "state DOWN, not ACTIVE", lambda f: _port(f, state="DOWN")),
    "a slow port": ("link", "rate 200", lambda f: _port(f, rate="200 Gb/sec (4X HDR)")),
    "a narrow slot": ("link", "width 8, not 16", _narrow),
    "a GPU that vanished": ("link", "0000:1b:00.0 (pci) is not there",
                            lambda f: with_host(f, BAD, links=f.hosts[BAD].links[1:])),
    "memory errors of a GPU": ("gpu", "uncorrectable", lambda f: with_host(f, BAD, gpus=(GPU,))),
    "a GPU that is held down": ("gpu", "hardware thermal at 91 C",
                                lambda f: with_host(f, BAD, gpus=(HOT,))),
    "silent": ("silent", "it never came", lambda f: f.model_copy(update={"silent": {BAD: "it never came"}})),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound() -> Fleet:
    return fleet(HOSTS, rounds=4)


@pytest.mark.parametrize("name", FAULTS)
def test_one_bad_host_among_two_hundred_is_named(sound: Fleet, name: str) -> None:
    check, words, fault = FAULTS[name]
    broken = fault(sound)
    assert bad(broken) == {(NAME, check)}
    assert any(words in finding.what for finding in found(broken) if finding.host == NAME), found(broken)
    verdict = verdict_of([state.host for state in broken.hosts], found(broken))
    assert verdict.bad == (NAME,) and len(verdict.good) == HOSTS - 1 and not verdict.ok


@pytest.mark.timeout(300)
def test_a_hundred_sound_fleets_raise_no_alarm() -> None:
    for seed in range(100):
        size = (3, 4, 8, 24, 120)[seed % 5]
        jitter = (0.005, 0.01, 0.02)[seed % 3]
        alarms = found(fleet(size, ranks=(1, 2, 8)[seed % 3] if size < 24 else 1, jitter=jitter, seed=seed, rounds=2))
        assert not alarms, (seed, size, jitter, alarms)


def test_ten_per_cent_are_found_in_small_fleets_and_at_twice_the_jitter() -> None:
    for hosts, jitter in ((6, 0.005), (8, 0.01), (64, 0.02)):
        for seed in range(10):
            broken = with_rank(fleet(hosts, jitter=jitter, seed=seed, rounds=2), 1, slower(0.9))
            assert ("node001", "rate") in bad(broken), (hosts, jitter, seed)


def test_one_slow_gpu_of_a_host_is_named_by_rank() -> None:
    broken = with_rank(fleet(8, ranks=8, rounds=2), 21, slower(0.9))
    (finding,) = [f for f in found(broken) if f.bad]
    assert finding.host == "node002" and finding.what.startswith("rank 21: products at 0.")


def test_a_slow_link_is_named_and_one_end_left_out() -> None:
    broken = with_slow_links(fleet(24), 0.5, lambda p: (p.a, p.b) == (4, 9))
    assert bad(broken) == {("node009", "pair")}
    (doubt,) = [f for f in found(broken) if not f.bad]
    assert doubt.host == "node004" and "of ranks 4 (node004) and 9 (node009)" in doubt.what


def test_one_rail_of_a_host_is_found_among_its_eight() -> None:
    broken = with_slow_links(fleet(12, ranks=8), 0.5, lambda p: 19 in (p.a, p.b) and p.a // 8 != p.b // 8)
    (finding,) = found(broken)
    assert (finding.host, finding.check, finding.bad) == ("node002", "pair", True)
    assert "rank 19: 11 of its 11 links" in finding.what


def test_a_changed_message_is_bad_on_two_ranks_too() -> None:
    two = fleet(2)
    pairs = tuple(p.model_copy(update={"fault": "a message came back changed"}) for p in two.pairs)
    assert bad(two.model_copy(update={"pairs": pairs})) == {("node001", "pair")}


def test_of_two_answers_both_hosts_are_named() -> None:
    broken = with_rank(fleet(2), 0, _answer(checksum="dead"))
    assert bad(broken) == {("node000", "answer"), ("node001", "answer")}
    assert any("which is right is not known" in f.what for f in found(broken))


def test_an_earlier_answer_decides_between_two() -> None:
    broken = with_rank(fleet(2), 0, _answer(checksum="dead"))
    key = broken.ranks[0].products[0].key
    told = found(broken, {key: "fp32-0123456789"})
    assert {(f.host, f.bad) for f in told} == {("node000", True)} and "as in earlier checks" in told[0].what
    told = found(fleet(1), {key: "beef"})  # one host against its own past: a doubt, no verdict
    assert [(f.host, f.bad) for f in told] == [("node000", False)] and "before it was beef" in told[0].what


def test_versions_without_a_majority_keep_the_first_host() -> None:
    told = found(with_rank(fleet(2), 1, _versions(torch="2.12.0")))
    assert [(f.host, f.bad) for f in told] == [("node001", True)] and "no majority" in told[0].what
    told = found(with_rank(fleet(4), 1, _versions(kernel="6.1")))
    assert [(f.host, f.bad) for f in told] == [("node001", False)], "another kernel is told, and no more"


def test_floors() -> None:
    told = found(fleet(1), floors=Floors({"bf16": 8e14}, 3e12))
    assert {f.check for f in told if f.bad} == {"rate", "memory"}
    assert not found(fleet(1), floors=Floors({"bf16": 4e14}, 1e12))


def test_a_wrong_collective_speaks_against_the_fleet_only() -> None:
    wrong = Collective(operation="all_reduce", size_bytes=4096, seconds=1e-4, bus_bytes_per_s=1e9, fault="rank 2 ...")
    broken = fleet(4).model_copy(update={"collectives": (wrong,)})
    assert bad(broken) == {("", "collective")}
    verdict = verdict_of([state.host for state in broken.hosts], found(broken))
    assert not verdict.ok and not verdict.bad and len(verdict.good) == 4


def test_ranks_that_waited_for_a_silent_one_are_not_blamed() -> None:
    broken = fleet(4).model_copy(update={"silent": {2: "it fell silent"}, "errors": {0: "timed out", 1: "timed out"}})
    assert bad(broken) == {("node002", "silent")}
    broken = fleet(4).model_copy(update={"errors": {0: "timed out"}})
    assert bad(broken) == {("", "exchange")}


def test_a_cpu_host_counts_once_and_its_own_exchanges_are_doubts_at_most() -> None:
    def cpu(state: RankState) -> RankState:
        return state.model_copy(update={"kind": "cpu", "memory": MemoryState(copy_bytes_per_s=2e10, tested_bytes=1)})

    one = fleet(1, ranks=8, device="AMD EPYC")
    one = one.model_copy(update={"ranks": tuple(map(cpu, one.ranks))})
    assert not bad(with_rank(one, 3, slower(0.5)))
    slow = with_slow_links(one, 0.2, lambda p: 3 in (p.a, p.b))
    assert not bad(slow) and [f.check for f in found(slow)] == ["pair"]


def test_devices_of_one_host_are_compared_with_each_other() -> None:
    one = fleet(1, ranks=8)
    links = list(one.hosts[0].links)
    links[2] = LinkState(kind="pci", name=links[2].name, fields={**links[2].fields, "width": "8"})
    told = found(with_host(one, 0, links=tuple(links)))
    assert [(f.check, f.bad) for f in told] == [("link", True)] and "0000:1d:00.0: width 8" in told[0].what
    few = [LinkState(kind="pci", name="0000:01:00.0", fields={"role": "gpu", "width": "8", "most_width": "16"})]
    told = found(with_host(one, 0, links=tuple(few)))
    assert [(f.check, f.bad) for f in told] == [("link", False)], "alone it may have been built so"


def test_spares_take_the_places_of_bad_hosts() -> None:
    hosts = [f"h{at}" for at in range(6)]
    told = [Finding("h1", "rate", True, ""), Finding("h4", "disk", True, ""), Finding("h0", "clock", False, "")]
    verdict = verdict_of(hosts, told, places=4)
    assert verdict.chosen == ("h0", "h5", "h2", "h3") and verdict.replaced == {"h1": "h5"} and not verdict.missing
    verdict = verdict_of(hosts, told, places=4, out=["h5", "h2"])
    assert verdict.chosen == ("h0", "h3") and verdict.missing == 2 and verdict.bad == ("h1", "h2", "h4", "h5")


def test_needed_files_grow_with_the_job() -> None:
    assert needed_files(1) < 1024 < needed_files(1000)


def test_cards_of_one_host_may_differ() -> None:
    """Two fast cards and a slow one, and of three ports one in use: alone nobody says that this is wrong."""
    one = fleet(1, ranks=2)
    speeds = {"eno1": "1000", "ens1": "25000", "ens2": "25000"}
    cards = [LinkState(kind="net", name=n, fields={"state": "up", "mbit_per_s": m}) for n, m in speeds.items()]
    assert [f.bad for f in found(with_host(one, 0, links=tuple(cards)))] == [False]
    ports = [LinkState(kind="net", name=n, fields={"state": s}) for n, s in (("a", "down"), ("b", "down"), ("c", "up"))]
    assert not found(with_host(one, 0, links=tuple(ports)))


def test_what_a_process_may_raise_by_itself_is_no_fault(sound: Fleet) -> None:
    limits = {**sound.hosts[BAD].limits, "open_files": 600}
    assert [f.bad for f in found(with_host(sound, BAD, limits={**limits, "hard_open_files": 524_288}))] == [False]
    assert [f.bad for f in found(with_host(sound, BAD, limits={**limits, "hard_open_files": 600}))] == [True]


def test_a_better_link_than_others_have_is_no_fault(sound: Fleet) -> None:
    assert not found(_port(sound, rate="800 Gb/sec (4X XDR)"))
