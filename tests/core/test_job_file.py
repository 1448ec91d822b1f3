"""The job file: what is read, what is refused and how it is said, and that a written job reads back equal."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.core.errors import ConfigError
from bessemer.core.job import (
    Corpus,
    DataSection,
    Job,
    KeepSection,
    MachineSection,
    ModelSection,
    RunSection,
    TrainSection,
)
from bessemer.core.job_file import dump_job, load_job, read_job, section_fields
from bessemer.core.layout import Layout
from bessemer.core.problem import Problem


def _load(tmp_path: Path, text: str, sets: tuple[str, ...] = ()) -> Job:
    path = tmp_path / "job.toml"
    path.write_text(text, encoding="utf-8")
    return load_job(path, sets)


def _problems(tmp_path: Path, text: str, sets: tuple[str, ...] = ()) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, text, sets)
    assert all(p.what and p.where and p.fix for p in caught.value.problems)
    return list(caught.value.problems)


def test_empty_file_is_the_default_job(tmp_path: Path) -> None:
    assert _load(tmp_path, "") == Job()


def test_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 7\r\n")
    assert load_job(path).train.steps == 7


def test_sets_override_in_order_with_toml_values_and_bare_words(tmp_path: Path) -> None:
    sets = (
        "train.steps=5",
        "train.steps = 50",
        "train.lr=1",
        "run.name=night-2",
        "run.tensorboard=true",
        'data.paths=["a/*.txt", "b"]',
        "layout.stage_layers=[1, 2]",
        "model.rope_scaling.factor=8",
        "data.tokenizer=some/tokenizer.json",
        'run.dir="with = sign"',
    )
    job = _load(tmp_path, "[train]\nsteps = 3\n", sets)
    assert (job.train.steps, job.train.lr, job.run.name, job.run.tensorboard) == (50, 1.0, "night-2", True)
    assert job.data.paths == ("a/*.txt", "b")
    assert job.layout.stage_layers == (1, 2)
    assert job.model.config_keys == {"rope_scaling": {"factor": 8}}
    assert job.data.tokenizer == "some/tokenizer.json"
    assert job.run.dir == "with = sign"


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("steps", "not of the form"),
        ("=5", "not of the form"),
        ("train..steps=5", "not of the form"),
        ("train.betas=[0.9", "not TOML"),
        ('run.name="a', "not TOML"),
        ("run.name=a\nb=3", "not TOML"),
        ("train.steps.x=5", "not a table"),
    ],
)
def test_malformed_sets_are_named(tmp_path: Path, override: str, part: str) -> None:
    (problem,) = _problems(tmp_path, "[train]\nsteps = 3\n", (override,))
    assert problem.code == "set-syntax" and part in problem.what and override in problem.where


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        ("[train]\nsteps = fifty\n", "2:9", "invalid value"),
        ("[train]\nsteps = 5\nsteps = 6\n", "3:10", "overwrite"),
        ("[train\nsteps = 5\n", "1:7", "expected"),
        ("[data]\npaths = [1,\n", "2:12", "invalid value"),
        ("x = " + "[" * 5000, "1:5005", "nested too deeply"),
        ("x = " + "9" * 5000, "1:5005", "4300 digits"),
    ],
)
def test_toml_errors_carry_file_line_and_column(tmp_path: Path, text: str, place: str, part: str) -> None:
    (problem,) = _problems(tmp_path, text)
    assert problem.code == "toml-syntax"
    assert problem.where == f"{tmp_path / 'job.toml'}:{place}"
    assert part in problem.what.lower()


def test_a_file_that_is_no_text_or_missing_or_a_folder(tmp_path: Path) -> None:
    binary = tmp_path / "job.bin"
    binary.write_bytes(b"[train]\n\xff\xfe\x00")
    assert [p.code for p in read_job(binary).problems] == ["toml-syntax"]
    assert "byte 8" in read_job(binary).problems[0].what
    for path in (tmp_path / "absent.toml", tmp_path):
        draft = read_job(path)
        assert draft.job is None and [p.code for p in draft.problems] == ["job-missing"]


def test_unknown_keys_name_the_nearest(tmp_path: Path) -> None:
    text = "[train]\nwarmup_step = 3\nzzz = 1\n[trian]\nseed = 1\n[layout]\ndp_shards = 'full'\n"
    found = {p.where: p for p in _problems(tmp_path, text)}
    assert set(found) == {"train.warmup_step", "train.zzz", "trian", "layout.dp_shards"}
    assert found["train.warmup_step"].fix == "train.warmup_steps"
    assert "layout.dp_shard" in found["layout.dp_shards"].fix
    assert found["trian"].code == "unknown-table" and found["trian"].fix == "[train]"
    assert "delete" in found["train.zzz"].fix


def test_misplaced_keys_name_their_table(tmp_path: Path) -> None:
    text = "steps = 4\n[train]\nseq_len = 3\nname = 'x'\n[model]\nseed = 4\nhidden_size = 32\n"
    found = {p.where: p for p in _problems(tmp_path, text)}
    assert {w: p.code for w, p in found.items()} == dict.fromkeys(
        ("steps", "train.seq_len", "train.name", "model.seed"), "misplaced-key"
    )
    assert "train.steps = 4" in found["steps"].fix
    assert "data.seq_len = 3" in found["train.seq_len"].fix
    assert "[run]" in found["train.name"].fix and "[machine]" in found["train.name"].fix


@pytest.mark.parametrize(
    ("line", "where", "code", "fix"),
    [
        ('[train]\nsteps = "50"', "train.steps", "wrong-type", "train.steps = 50"),
        ("[train]\nsteps = 1e3", "train.steps", "wrong-type", "train.steps = 1000"),
        ("[train]\nsteps = 2.5", "train.steps", "wrong-type", "train.steps = 2 or 3"),
        ("[train]\nsteps = true", "train.steps", "wrong-type", "train.steps = 100 is the default"),
        ("[train]\nsteps = 2024-01-01", "train.steps", "wrong-type", "train.steps = 100 is the default"),
        ('[train]\nlr = "3e-4"', "train.lr", "wrong-type", "train.lr = 0.0003"),
        ("[train]\nlr = -1", "train.lr", "out-of-range", "train.lr = 0.003 is the default"),
        ("[train]\nlr = inf", "train.lr", "out-of-range", "a finite number for train.lr"),
        ("[train]\nbetas = [0.9, nan]", "train.betas", "out-of-range", "a finite number for train.betas"),
        ("[train]\nbetas = [0.9]", "train.betas[1]", "out-of-range", "train.betas = [0.9, 0.95] is the default"),
        ("[train]\nbetas = [0.9, 0.9, 0.9]", "train.betas", "out-of-range", "train.betas = [0.9, 0.95] is the default"),
        ('[train]\noptimizer = "adam"', "train.optimizer", "unknown-choice", 'train.optimizer = "adamw"'),
        ("[train]\noptimizer = 5", "train.optimizer", "unknown-choice", 'train.optimizer = "adamw" is the default'),
        ('[run]\ntensorboard = "yes"', "run.tensorboard", "wrong-type", "run.tensorboard = true"),
        ('[run]\nname = "../x"', "run.name", "out-of-range", 'run.name = "run" is the default'),
        ('[data]\npaths = "x"', "data.paths", "wrong-type", 'data.paths = ["x"]'),
        ("[data]\npaths = [5]", "data.paths[0]", "wrong-type", 'data.paths[0] = "5"'),
        ("[data]\nmixture = [{weigt = 2}]", "data.mixture[0].weigt", "unknown-key", "weight"),
        ("[data]\nmixture = [{weight = inf}]", "data.mixture", "out-of-range", "a finite number for data.mixture"),
        ("[data]\nmixture = [3]", "data.mixture[0]", "wrong-type", "a list such as data.mixture = "),
        ("[layout]\ndp = 0", "layout.dp", "out-of-range", "layout.dp = 1 is the default"),
        ("[layout]\ntp = 9999999", "layout.tp", "out-of-range", "layout.tp = 1 is the default"),
        ("[layout]\nstage_layers = [4, 0]", "layout.stage_layers[1]", "out-of-range", "a list such as layout.stage"),
        ("[machine]\nname = 5", "machine.name", "wrong-type", 'machine.name = "5"'),
        ('[machine]\ngpus = "four"', "machine.gpus", "wrong-type", "delete machine.gpus to have it chosen"),
        ("layout = 5", "layout", "wrong-type", "a line [layout], and its keys below it"),
        ("[[keep]]\nevery = 5", "keep", "wrong-type", "a line [keep], and its keys below it"),
    ],
)
def test_wrong_values_in_plain_words(tmp_path: Path, line: str, where: str, code: str, fix: str) -> None:
    (problem,) = _problems(tmp_path, line + "\n")
    assert (problem.where, problem.code) == (where, code)
    assert problem.fix.startswith(fix)
    assert "Input should" not in problem.what  # pydantic's own words never reach a user


def test_all_slips_come_at_once(tmp_path: Path) -> None:
    text = 'lr = 1\n[train]\nsteps = "x"\nsede = 3\n[keep]\nmode = "restrat"\n[data]\nseq_len = 0\n'
    problems = _problems(tmp_path, text, ("layout.dp=none",))
    assert sorted(p.where for p in problems) == [
        "data.seq_len", "keep.mode", "layout.dp", "lr", "train.sede", "train.steps",
    ]  # fmt: skip


def test_a_draft_goes_on_with_what_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[train]\nstep = 7\nlr = "x"\nglobal_batch = 32\nseq_len = 64\n', encoding="utf-8")
    draft = read_job(path)
    assert draft.job is not None
    assert (draft.job.train.steps, draft.job.train.global_batch, draft.job.data.seq_len) == (7, 32, 64)
    assert draft.job.train.lr == Job().train.lr
    assert draft.doubtful == {"train.steps", "train.lr", "data.seq_len"}


def test_section_fields_are_those_of_the_job() -> None:
    fields = section_fields()
    assert list(fields) == ["run", "model", "data", "layout", "train", "precision", "keep", "inspect", "machine"]
    assert fields["model"] == ("preset", "hf", "family", "weights")


KEYS = {key for keys in section_fields().values() for key in keys}
_texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
_values = st.recursive(
    st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts.filter(bool), inner, max_size=3),
    max_leaves=6,
)
_extras = st.dictionaries(
    _texts.filter(lambda k: k and k not in KEYS and k not in dir(ModelSection)),
    _values,
    max_size=4,
)
_floats = st.floats(min_value=1e-300, max_value=1e300)
_jobs = st.builds(
    Job,
    run=st.builds(RunSection, name=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,9}\Z"), dir=_texts, resume=_texts),
    model=st.builds(lambda hf, extra: ModelSection(hf=hf, **extra), st.none() | _texts, _extras),
    data=st.builds(
        DataSection,
        paths=st.lists(_texts, max_size=3).map(tuple),
        mixture=st.lists(st.builds(Corpus, corpus=st.none() | _texts, weight=_floats), max_size=2).map(tuple),
    ),
    layout=st.builds(Layout, dp=st.integers(1, 64), stage_layers=st.lists(st.integers(1, 9), max_size=3).map(tuple)),
    train=st.builds(
        TrainSection,
        lr=_floats,
        eps=_floats,
        decay_fraction=st.none() | st.floats(0.01, 1),
        batch_ramp=st.lists(st.tuples(st.integers(), st.integers()), max_size=3).map(tuple),
    ),
    keep=st.builds(KeepSection, replicas=st.none() | st.integers(1, 9), unit=st.none() | st.integers(1, 99)),
    machine=st.builds(MachineSection, name=_texts, gpus=st.none() | st.integers(1, 9999)),
)


@settings(max_examples=60, deadline=None)
@given(job=_jobs)
def test_a_written_job_reads_back_equal(job: Job, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(dump_job(job), encoding="utf-8", newline="")
    again = load_job(path)
    assert again == job and again.hash == job.hash and again.identity == job.identity


def test_the_written_default_job_names_every_field_that_has_a_value() -> None:
    text = dump_job(Job())
    for section, keys in section_fields().items():
        table = getattr(Job(), section)
        assert f"[{section}]" in text
        for key in keys:
            assert (f"\n{key} = " in text) or getattr(table, key) is None


def test_a_default_warm_up_that_is_written_out_is_the_same_run() -> None:
    chosen, given = (Job(train=TrainSection(steps=50, warmup_steps=steps)) for steps in (None, 5))
    assert chosen.identity == given.identity
    assert chosen.identity != Job(train=TrainSection(steps=50, warmup_steps=10)).identity
