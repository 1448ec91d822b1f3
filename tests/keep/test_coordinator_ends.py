"""The end of a coordinator's process is heard of, whoever asks before whether it runs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from bessemer.keep.coordinators import Coordinators, Post
from bessemer.keep.hub import Hub
from bessemer.keep.process import Child


def test_asking_whether_it_runs_takes_its_end_from_nobody(tmp_path: Path) -> None:
    hub = Hub(tmp_path / "h")
    try:
        post = Post("", Child([sys.executable, "-c", "input()"], os.environ, is_vault=True))
        assert post.child is not None
        post.child.start()
        assert post.runs
        hub.watch(post.child.pidfd, post)
        post.child.close_input()
        deadline = time.monotonic() + 60
        while post.runs:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [heard.watched for heard in hub.poll(1.0)] == [post]
        assert post.child.exit_code() == 1 and not post.runs
    finally:
        hub.close()


def test_a_wish_that_was_fulfilled_is_not_said_to_the_next_coordinator(tmp_path: Path) -> None:
    hub = Hub(tmp_path / "h")
    try:
        coordinators = Coordinators(tmp_path, tmp_path, hub, secret="s", lease_s=1.0)
        coordinators.tell("scale", {"kind": "scale", "replicas": 6})
        coordinators.fulfilled("scale", {"kind": "scale", "replicas": 4})  # another one's, decided before this one
        assert coordinators._told == {"scale": {"kind": "scale", "replicas": 6}}
        coordinators.fulfilled("scale", {"kind": "scale", "replicas": 6})
        assert not coordinators._told
    finally:
        hub.close()
