"""What `bessemer launch` writes: sbatch scripts that bash runs (with stand-ins for Slurm's commands) and whose options
sbatch has, and manifests whose fields Kubernetes has; and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster_fields import SBATCH_OPTIONS, faults

from bessemer.api._launch import Launched, launch
from bessemer.cli._signature import command_parameters, parameter_docs
from bessemer.core.errors import ConfigError, RequestError
from bessemer.core.job_file import load_job
from bessemer.keep.agent import Timeouts
from bessemer.keep.pod import run

JOB = "job.toml"
TEXT = """
[run]
name = "first-heat"
[model]
family = "llama"
vocab_size = 257
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
[data]
tokenizer = "bytes"
seq_len = 16
[layout]
dp = 2
"""
SIXTEEN = ['machine.name="h100"', "layout.dp=16", "train.global_batch=128", "train.micro_batch=1"]
ELASTIC = ['keep.mode="zero-interruption"', "keep.spares=1"]
AGENTS = [*SIXTEEN, 'keep.mode="zero-interruption"', "keep.spares=2"]
PODS: dict[str, Any] = {"on": "kubernetes", "image": "registry.example/bessemer:1", "claim": "runs"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(JOB).write_text(TEXT)


def directives(text: str) -> dict[str, str | None]:
    """The #SBATCH lines, of which sbatch reads those before the first command."""
    head = text.partition("\nset -u\n")[0]
    assert text.count("#SBATCH") == head.count("#SBATCH")
    found: dict[str, str | None] = {}
    for line in re.findall(r"^#SBATCH --(.*)$", head, flags=re.MULTILINE):
        name, equals, value = line.partition("=")
        assert name not in found
        found[name] = value if equals else None
    return found


def srun_options(text: str) -> dict[str, str]:
    [line] = re.findall(r"^  srun .*? (--nodes=.*) \\$", text, flags=re.MULTILINE)
    return dict(word.removeprefix("--").split("=") for word in line.split())


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a manifest: comments, then JSON after each separator, as a YAML reader sees them."""
    comments, *parts = text.split("\n---\n")
    assert all(line.startswith("# ") for line in comments.splitlines())
    return [json.loads(part) for part in parts]


def codes(error: ConfigError) -> set[tuple[str, str]]:
    return {(problem.code, problem.where) for problem in error.problems}


# ---- Slurm


@pytest.mark.parametrize("extra", [{}, {"time": "2-12:00:00", "partition": "gpu", "account": "lab", "cpus": 8},
                                   {"restarts": 2, "spare_nodes": 1}])  # fmt: skip
@pytest.mark.parametrize("sets", [[], SIXTEEN, AGENTS])
def test_sbatch_has_every_option_and_bash_reads_the_script(sets: list[str], extra: dict[str, Any]) -> None:
    if not sets and "spare_nodes" in extra:
        extra = {"restarts": 2}
    text = launch(JOB, sets, on="slurm", **extra).text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)
    for name, value in directives(text).items():
        assert name in SBATCH_OPTIONS, name
        pattern = SBATCH_OPTIONS[name]
        assert (value is None) == (pattern is None), name
        assert pattern is None or re.fullmatch(pattern, value or ""), (name, value)


def test_layout_and_hosts_decide_nodes_and_ranks() -> None:
    text = launch(JOB, SIXTEEN, on="slurm", restarts=1, spare_nodes=2, cpus=4).text
    found = directives(text)
    assert (found["nodes"], found["ntasks-per-node"], found["gpus-per-node"]) == ("4", "8", "8")
    assert "no-kill" in found
    step = srun_options(text)
    assert (step["nodes"], step["ntasks"], step["ntasks-per-node"], step["cpus-per-task"]) == ("2", "16", "8", "4")
    assert step["kill-on-bad-exit"] == "0" and int(step["wait"]) >= Timeouts().stop_s
    quarter = [*SIXTEEN, "machine.gpus_per_node=4"]
    assert directives(launch(JOB, quarter, on="slurm").text)["nodes"] == "4"


def test_no_gpus_on_cpus_and_one_host_has_an_agent() -> None:
    text = launch(JOB, on="slurm").text
    assert "gpus-per-node" not in directives(text) and "srun " not in text.split("set -u")[1].replace(
        "Without srun", ""
    )


def test_an_agent_on_each_host_for_runs_that_outlive_hosts() -> None:
    """Eighteen groups of one rank, two of them spare: three hosts of six."""
    text = launch(JOB, AGENTS, on="slurm", cpus=4).text
    found, step = directives(text), srun_options(text.replace(" --no-kill ", " "))
    assert (found["nodes"], found["ntasks-per-node"], found["gpus-per-node"]) == ("3", "1", "6")
    assert (step["nodes"], step["ntasks"], step["ntasks-per-node"]) == ("3", "3", "1")
    assert found["cpus-per-task"] == step["cpus-per-task"] == "24"
    assert step["wait"] == "0" and "no-kill" in found and " --no-kill " in text
    pairs = [*AGENTS, "layout.tp=2", "layout.dp=8", "machine.gpus_per_node=8"]
    assert (launch(JOB, pairs, on="slurm").hosts.count, launch(JOB, pairs, on="slurm").hosts.ranks) == (3, 8)


def test_agents_are_told_where_all_are_and_share_a_secret(tmp_path: Path) -> None:
    agent = 'echo "$BESSEMER_HOSTS $MASTER_PORT ${#BESSEMER_SECRET}" >agents; exit 1'
    env = stand_ins(tmp_path, bessemer=agent)
    submit(launch(JOB, AGENTS, on="slurm").text, env).communicate(timeout=30)
    assert Path("agents").read_text() == "n1,n2,n3 20002 64\n"
    submit(launch(JOB, AGENTS, on="slurm").text, {**env, "BESSEMER_SECRET": "s" * 20}).communicate(timeout=30)
    assert Path("agents").read_text() == "n1,n2,n3 20002 20\n"


def test_a_run_that_has_finished_has_although_a_host_was_lost(tmp_path: Path) -> None:
    agent = 'mkdir -p runs/first-heat; echo \'{"t":1,"event":"finished"}\' >runs/first-heat/events.jsonl; exit 143'
    process = submit(launch(JOB, AGENTS, on="slurm", restarts=2).text, stand_ins(tmp_path, bessemer=agent))
    process.communicate(timeout=30)
    assert process.returncode == 0 and len(Path("log").read_text().splitlines()) == 1


def stand_ins(folder: Path, *, bessemer: str, nodes: Sequence[str] = ("n1", "n2", "n3")) -> dict[str, str]:
    """An environment in which srun runs its command once on this host, and others note what they are asked."""
    tools = folder / "bin"
    tools.mkdir()
    scripts = {
        "bessemer": bessemer,
        "srun": 'echo "srun $MASTER_ADDR $MASTER_PORT $*" >>log\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
        "scontrol": f'if [[ $1 == show ]]; then printf "%s\\n" {" ".join(nodes)}; else echo "scontrol $*" >>log; fi\n',
        "sinfo": 'echo "n1 down*"; echo "n2 mixed"; echo "n3 allocated"\n',
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}")
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "12001", "SLURM_JOB_NODELIST": "n[1-3]"}
    return {"PATH": f"{tools}:{os.environ['PATH']}", **job}


def submit(text: str, env: dict[str, str]) -> subprocess.Popen[str]:
    Path("log").write_text("")
    Path("script").write_text(text)
    return subprocess.Popen(["bash", "script"], env=env, stdout=subprocess.PIPE, text=True)


SAVES = "mkdir -p runs/first-heat/checkpoints/step-9\n"


@pytest.mark.parametrize(("rank", "code", "starts", "requeued"), [
    ("exit 0", 0, 1, False),
    ("exit 2", 2, 1, False),
    ("exit 1", 1, 3, False),
    ("exit 3", 3, 1, False),
    (SAVES + "exit 3", 3, 1, True),
    ("echo >>tries; [[ $(wc -l <tries) == 2 ]] || exit 137", 0, 2, False),
])  # fmt: skip
def test_exit_codes_decide_what_follows(tmp_path: Path, rank: str, code: int, starts: int, requeued: bool) -> None:
    text = launch(JOB, SIXTEEN, on="slurm", restarts=2).text
    process = submit(text, stand_ins(tmp_path, bessemer=rank, nodes=("n1", "n2")))
    process.communicate(timeout=30)
    log = Path("log").read_text().splitlines()
    assert process.returncode == code
    assert len([line for line in log if line.startswith("srun")]) == starts
    assert ("scontrol requeue 12001" in log) == requeued
    ports = [int(line.split()[2]) for line in log if line.startswith("srun")]
    assert ports == list(range(20001, 20001 + starts)), "each attempt has a port of its own"


def test_spare_nodes_take_the_place_of_lost_ones(tmp_path: Path) -> None:
    text = launch(JOB, SIXTEEN, on="slurm", restarts=1, spare_nodes=1).text
    submit(text, stand_ins(tmp_path, bessemer="exit 0")).communicate(timeout=30)
    assert Path("log").read_text().startswith("srun n2 20001 --nodelist=n2,n3 ")


def test_too_few_hosts_are_told(tmp_path: Path) -> None:
    text = launch(JOB, [*SIXTEEN, "machine.gpus_per_node=4"], on="slurm", restarts=1, spare_nodes=1).text
    process = submit(text, stand_ins(tmp_path, bessemer="exit 0"))
    assert "only 2 of 4 hosts are up" in process.communicate(timeout=30)[0]
    assert process.returncode == 1 and not Path("log").read_text()


@pytest.mark.parametrize("sets", [[], SIXTEEN])
def test_a_signal_reaches_the_ranks_and_their_code_comes_back(tmp_path: Path, sets: list[str]) -> None:
    rank = f"trap '{SAVES.strip()}; exit 3' TERM\ntouch started\nwhile true; do sleep 0.05; done\n"
    text = launch(JOB, sets, on="slurm", restarts=2, setup=["setup=1"]).text
    process = submit(text, stand_ins(tmp_path, bessemer=rank, nodes=("n1", "n2")))
    while not Path("started").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 3 and "scontrol requeue 12001" in Path("log").read_text()


def test_after_a_signal_nothing_is_started_again(tmp_path: Path) -> None:
    rank = "trap 'exit 1' TERM\necho >>started\nwhile true; do sleep 0.05; done\n"
    process = submit(launch(JOB, on="slurm", restarts=5).text, stand_ins(tmp_path, bessemer=rank))
    while not Path("started").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 1 and len(Path("started").read_text().splitlines()) == 1


# ---- Kubernetes


@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize("sets", [[], SIXTEEN, ELASTIC, AGENTS])
def test_kubernetes_has_every_field(sets: list[str], restarts: int) -> None:
    secret = "bessemer" if sets in (ELASTIC, AGENTS) else ""
    result = launch(JOB, sets, **PODS, restarts=restarts, cpus=4, memory="64Gi", namespace="lab", secret=secret)
    for item in documents(result.text):
        assert faults(item) == []


def test_faults_are_found() -> None:
    [_, job] = documents(launch(JOB, **PODS).text)
    pod = job["spec"]["template"]["spec"]
    pod["containers"][0]["imagePullPolice"] = "Always"
    del pod["volumes"][0]["name"]
    job["spec"]["completions"] = "2"
    job["spec"]["podFailurePolicy"]["rules"][0]["action"] = "Ignored"
    assert {fault.partition(":")[0] for fault in faults(job)} == {
        "spec.completions", "spec.podFailurePolicy.rules[0].action", "spec.template.spec.containers[0].imagePullPolice",
        "spec.template.spec.volumes[0].name",
    }  # fmt: skip


def test_a_pod_a_host_finds_rank_0_by_name() -> None:
    config, service, job = documents(launch(JOB, SIXTEEN, **PODS, name="heat").text)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert variables["MASTER_ADDR"] == f"heat-0.{pod['subdomain']}" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["ports"][0]["port"] == int(variables["MASTER_PORT"] or 0)
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"} == container["resources"]["requests"]
    assert container["command"][-4:] == ["--hosts", "2", "--ranks", "8"]
    assert pod["terminationGracePeriodSeconds"] == Timeouts().stop_s + 60
    Path("resolved.toml").write_text(config["data"]["job.toml"])
    assert load_job("resolved.toml") == load_job(JOB, SIXTEEN), "the pods run the resolved job"


def test_a_job_set_restarts_whole_and_doesnt_count_stops() -> None:
    _, group = documents(launch(JOB, SIXTEEN, **PODS, name="heat", restarts=3).text)
    policy, [part] = group["spec"]["failurePolicy"], group["spec"]["replicatedJobs"]
    rules = part["template"]["spec"]["podFailurePolicy"]["rules"]
    assert policy["maxRestarts"] == 3
    assert policy["rules"][0]["onJobFailureReasons"] == ["FailedIndexes"]
    assert (rules[0]["action"], rules[0]["onExitCodes"]["values"]) == ("FailIndex", [3])
    variables = part["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "MASTER_ADDR", "value": f"heat-{part['name']}-0-0.heat"} in variables


def test_pods_with_agents_come_back_one_by_one() -> None:
    text = launch(JOB, AGENTS, **PODS, name="heat", restarts=3, secret="bessemer").text
    _, service, job = documents(text)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (spec["completions"], spec["parallelism"], spec["backoffLimitPerIndex"]) == (3, 3, 3)
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore", "FailJob", "Ignore"]
    assert container["command"][-2:] == ["train", "/etc/bessemer/job.toml"]
    assert pod["subdomain"] == service["metadata"]["name"] == "heat"
    names = ",".join(f"heat-{n}.heat" for n in range(3))
    assert (variables["WORLD_SIZE"], variables["BESSEMER_HOSTS"]) == ("3", names)
    assert {"RANK", "BESSEMER_SECRET", "MASTER_PORT"} <= variables.keys()
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "6"}


def test_one_host_goes_on_after_a_stop_and_keeps_the_secret_out() -> None:
    text = launch(JOB, ELASTIC, **PODS, restarts=2, secret="bessemer").text
    [_, job] = documents(text)
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert (rules[0]["action"], rules[0]["onExitCodes"]["values"]) == ("Ignore", [3])
    assert job["spec"]["backoffLimit"] == 2
    variables = job["spec"]["template"]["spec"]["containers"][0]["env"]
    [reference] = [entry for entry in variables if entry["name"] == "BESSEMER_SECRET"]
    assert reference["valueFrom"] == {"secretKeyRef": {"name": "bessemer", "key": "secret"}}
    assert "When the host itself is lost, the run starts again" in text


# ---- what is refused


@pytest.mark.parametrize(("sets", "flags", "expected"), [
    ([*AGENTS, "layout.tp=2", "layout.dp=8", "machine.gpus_per_node=1"], {"on": "slurm"},
     {("launch-mode", "keep.mode")}),
    ([*AGENTS, "keep.restarts=3"], {"on": "slurm"}, {("launch-mode", "keep.restarts")}),
    (AGENTS, PODS, {("launch-missing", "--secret")}),
    ([*SIXTEEN, "keep.restarts=3"], {"on": "slurm"}, {("launch-mode", "keep.restarts")}),
    (["layout.dp=3", "machine.gpus_per_node=2", "train.global_batch=24"], {"on": "slurm"},
     {("gpus-per-node", "machine.gpus_per_node")}),
    (SIXTEEN, {"on": "slurm", "image": "x", "time": "1 day", "partition": "a\n#SBATCH --uid=0", "cpus": 0},
     {("launch-flag", "--image"), ("launch-value", "--time"), ("launch-value", "--partition"),
      ("launch-value", "--cpus")}),
    (SIXTEEN, {"on": "slurm", "spare_nodes": 1}, {("launch-flag", "--spare-nodes")}),
    (SIXTEEN, {"on": "slurm", "time": "00:02:00"}, {("launch-value", "--time")}),
    (SIXTEEN, {"on": "kubernetes"}, {("launch-missing", "--image"), ("launch-missing", "--claim")}),
    (['run.name="First_Heat"'], PODS, {("launch-name", "--name")}),
    (['run.dir="/data/runs"'], PODS, {("launch-folder", "--mount")}),
    ([], {**PODS, "secret": "bessemer", "account": "lab"}, {("launch-flag", "--secret"), ("launch-flag", "--account")}),
    ([], {**PODS, "gpu_resource": "nvidia.com/gpu"}, {("launch-flag", "--gpu-resource")}),
    (['machine.name="mtt-s5000"'], PODS, {("launch-missing", "--gpu-resource")}),
])  # fmt: skip
def test_what_cannot_work_is_refused(sets: list[str], flags: dict[str, Any], expected: set[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError) as caught:
        launch(JOB, sets, **flags, out="file")
    assert codes(caught.value) == expected
    assert all(problem.fix for problem in caught.value.problems)
    assert not Path("file").exists()


def test_a_time_limit_is_read_as_sbatch_does() -> None:
    for limit in ("4", "04:00", "00:04:00", "0-1"):
        launch(JOB, on="slurm", time=limit)
    for limit in ("3", "03:00", "00:03:00", "0-0"):
        with pytest.raises(ConfigError, match="leaves no time"):
            launch(JOB, on="slurm", time=limit)


def test_a_file_is_written_once() -> None:
    result: Launched = launch(JOB, on="slurm", out="heat.sbatch")
    assert Path("heat.sbatch").read_text() == result.text and "sbatch heat.sbatch" in str(result)
    with pytest.raises(RequestError, match="exists already"):
        launch(JOB, on="slurm", out="heat.sbatch")
    with pytest.raises(RequestError, match="can't write"):
        launch(JOB, on="slurm", out="nowhere/heat.sbatch")


def test_each_flag_is_documented() -> None:
    assert {parameter.name for parameter in command_parameters(launch)} == set(parameter_docs(launch))


# ---- the ranks of a pod


def ranks(script: str, *, hosts: int = 2, host: int = 1, count: int = 2) -> int:
    """The exit code of a pod whose ranks are this script, in a process of its own, since it takes over signals."""
    quick = "Timeouts(grace_s=0.2, kill_s=0.2, vault_s=5.0)"
    call = f"run(['bash', '-c', {script!r}], host={host}, hosts={hosts}, ranks={count}, timeouts={quick})"
    source = f"from bessemer.keep.agent import Timeouts\nfrom bessemer.keep.pod import run\nraise SystemExit({call})"
    return subprocess.run([sys.executable, "-c", source], timeout=60, check=False, stderr=subprocess.DEVNULL).returncode


def test_ranks_are_numbered_across_hosts_and_what_they_leave_is_awaited() -> None:
    code = ranks('echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE" >rank-$RANK\n(sleep 0.5; touch saved-$RANK) &')
    assert code == 0
    assert Path("rank-2").read_text() == "2 4 0 2\n" and Path("rank-3").read_text() == "3 4 1 2\n"
    assert Path("saved-2").exists() and Path("saved-3").exists()


@pytest.mark.parametrize(("script", "code"), [
    ("exit $((3 * LOCAL_RANK))", 3),
    ("exit 2", 2),
    ("((LOCAL_RANK)) && exit 7; trap '' TERM; while true; do sleep 0.05; done", 1),
    ("((LOCAL_RANK)) && exit 3; kill -SEGV $$", 1),
])  # fmt: skip
def test_the_code_of_a_pod(script: str, code: int) -> None:
    assert ranks(script) == code


def test_a_pod_passes_a_stop_on() -> None:
    script = "trap 'exit 3' TERM; touch up-$RANK; ((LOCAL_RANK)) || { while [[ ! -e up-3 ]]; do sleep 0.02; done\n"
    script += "kill -TERM $PPID; }\nwhile true; do sleep 0.02; done"
    assert ranks(script) == 3


def test_run_is_what_the_pods_command_calls() -> None:
    done = subprocess.run([sys.executable, "-m", "bessemer.keep.pod", "missing.toml", "--host", "0", "--hosts", "1",
                           "--ranks", "1"], timeout=60, check=False, capture_output=True, text=True)  # fmt: skip
    assert run.__module__ == "bessemer.keep.pod" and done.returncode == 2 and "job-missing" in done.stderr
