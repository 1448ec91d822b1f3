"""What a rank checks before it trains."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from ranks import run_ranks
from train.toy import toy_job

from bessemer.core.errors import RunFolderError
from bessemer.core.job import Job
from bessemer.keep.launch import Launch
from bessemer.keep.member import Member
from bessemer.parallel.mesh import build_mesh
from bessemer.train.worker import _same_folder


def look(rank: int, world: int, job: Job, folders: list[str]) -> str:
    member = Member(Launch(launcher="env", rank=rank, world_size=world, local_rank=0, local_world_size=1))
    member.run_folder = Path(folders[rank])
    try:
        _same_folder(member, build_mesh(job, rank, torch.device("cpu")))
    except RunFolderError as error:
        return f"{error.code}: {error.message}"
    return ""


def test_hosts_that_see_different_run_folders_are_told_on_every_rank(tmp_path: Path) -> None:
    for name, token in (("a", "1"), ("b", "2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"token": token}))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    job = toy_job(layout={"dp": 3}, train={"global_batch": 6})
    assert run_ranks(3, look, job, [a, a, a]) == ["", "", ""]
    for message in run_ranks(3, look, job, [a, b, a]):
        assert message.startswith("other-folder: ranks 1 don't see")
