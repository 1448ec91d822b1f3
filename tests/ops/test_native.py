"""Compiling the kernels: where they go, and what happens without a compiler."""

import os
import subprocess
import sys

from bessemer import ops
from bessemer.ops import native

PROBE = "from bessemer import ops; print(ops.why_absent()); print(ops.paths()['attend'])"


def probe(**environment):
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_without_a_compiler_the_reference_is_taken_and_the_reason_kept(tmp_path):
    why, path = probe(PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path), CXX="")
    assert "no C++ compiler" in why and path == "reference"


def test_a_failing_compiler_is_named_and_leaves_nothing(tmp_path):
    broken = tmp_path / "g++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "internal error" >&2\nexit 4\n')
    broken.chmod(0o755)
    why, path = probe(CXX=str(broken), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert "internal error" in why and path == "reference"
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_the_reason_of_a_fallback_is_one_line(monkeypatch):
    monkeypatch.setattr(native, "_tried", True)
    monkeypatch.setattr(native, "_why", "the compiler failed: a.cpp:1:\n   error: no")
    assert ops.fallback_reason() == "the compiler failed: a.cpp:1: error: no"
    monkeypatch.setattr(native, "_why", "")
    assert ops.fallback_reason() == ""


def test_the_kernels_share_torchs_thread_pool():
    """One OpenMP runtime in the process: two would each keep threads that wait by spinning."""
    if ops.why_absent():
        return
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}
    assert len(runtimes) == 1


def test_the_file_name_follows_sources_and_flags(monkeypatch, tmp_path):
    if ops.why_absent():
        return
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []
    monkeypatch.setattr(native, "_compile", lambda compiler, target: made.append(target.name))
    native._build()
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-DX"))
    native._build()
    assert len(set(made)) == 2
