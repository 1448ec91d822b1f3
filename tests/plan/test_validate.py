"""Validation: rows are read or skipped with a reason, never lost; the accuracy that was reached holds."""

import csv
import math
import random
from pathlib import Path

import pytest

import bessemer.plan
from bessemer.core.errors import DataError
from bessemer.plan.price import BANDS
from bessemer.plan.rows import read_rows
from bessemer.plan.validate import validate
from bessemer.plan.validation_page import accuracy_table, page

ROWS = Path(__file__).parent / "measured_training.csv"
GOOD = {
    "id": "LAB-001",
    "source_id": "LAB",
    "year": "2026",
    "model": "A model of ours",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "head_dim": "128",
    "ffn": "14336",
    "ffn_gated": "yes",
    "vocab": "128256",
    "seq_len": "8192",
    "gpu": "H100-80GB-SXM",
    "n_gpus": "16",
    "gpus_per_node": "8",
    "dtype": "bf16",
    "framework": "Megatron-LM",
    "tp": "2",
    "pp": "1",
    "cp": "1",
    "dp": "8",
    "mbs": "1",
    "gbs": "128",
    "step_time_s": "6.5",
}


def write(path, *changes):
    names = ROWS.read_text(encoding="utf-8").splitlines()[0].split(",")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        for i, change in enumerate(changes):
            writer.writerow({**GOOD, "id": f"LAB-{i + 1:03d}", **change})
    return path


def test_a_row_of_an_unknown_model_is_predicted_from_its_columns(tmp_path):
    found = validate(write(tmp_path / "rows.csv", {}))
    assert set(found) == {"sources", "all", "rows"}
    row = found["rows"][0]
    assert set(row) == {"id", "measured_s", "predicted_s", "measured_mem", "predicted_mem", "assumed"}
    assert row["measured_s"] == 6.5
    assert 4 < row["predicted_s"] < 9
    assert {"recompute none", "sequence parallel on"} <= set(row["assumed"])
    lab = found["sources"]["LAB"]
    assert lab["rows"] == 1 and lab["skipped"] == {} and lab["mem_rows"] == 0
    assert lab["time_bias"] == pytest.approx(row["predicted_s"] / 6.5 - 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "TPU v5p"}, "gpu not known"),
        ({"layers": ""}, "architecture not printed"),
        ({"seq_len": ""}, "no seq_len"),
        ({"seq_len": "many"}, "seq_len is not a number"),
        ({"hidden": "nan"}, "hidden is no sensible number"),
        ({"layers": "-3"}, "layers is no sensible number"),
        ({"n_gpus": ""}, "no GPU count"),
        ({"tp": "", "pp": ""}, "parallel configuration not printed"),
        ({"tp": "3", "dp": ""}, "degrees don't multiply to the GPU count"),
        ({"gbs": "", "mbs": ""}, "no global batch"),
        ({"gbs": "4"}, "global batch smaller than micro-batch x dp"),
        ({"step_time_s": ""}, "no step time, rate or memory"),
        ({"dtype": "int3"}, "dtype int3 not known"),
        ({"tp": "0"}, "malformed"),
        ({"gpu": "A100-80GB-SXM", "dtype": "fp8"}, "no fp8 units"),
    ],
)
def test_a_row_that_cannot_be_predicted_is_counted_with_its_reason(tmp_path, change, reason):
    found = validate(write(tmp_path / "rows.csv", {}, change))
    assert found["sources"]["LAB"]["rows"] == 1
    [(given, count)] = found["sources"]["LAB"]["skipped"].items()
    assert reason in given and count == 1
    assert all(math.isfinite(r["predicted_s"]) for r in found["rows"])


def test_rows_full_of_slips_are_predicted_or_counted(tmp_path):
    """Random cells replaced by rubbish: every row still comes out on one side or the other."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        lines, names = list(reader), list(reader.fieldnames or [])
    dice = random.Random(3)
    for _ in range(300):
        line = lines[dice.randrange(len(lines))]
        line[names[dice.randrange(1, len(names))]] = dice.choice(
            ["", "0", "-1", "nan", "inf", "x", "1e9", "3", '"', "1e400"]
        )
    path = tmp_path / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(lines)
    found = validate(path)
    assert len(found["rows"]) + sum(found["all"]["skipped"].values()) == len(lines)
    assert all(r["predicted_s"] is not None and math.isfinite(r["predicted_mem"]) for r in found["rows"])


def test_a_rate_stands_in_for_the_step_time(tmp_path):
    path = write(
        tmp_path / "rows.csv",
        {"step_time_s": "", "tokens_per_s_per_gpu": "10000"},
        {"step_time_s": "", "tflops_per_gpu": "400", "flops_convention": "full attention"},
    )
    tokens, rate = validate(path)["rows"]
    assert tokens["measured_s"] == pytest.approx(128 * 8192 / (10000 * 16))
    assert "step time from model FLOPs with full attention" in rate["assumed"]


@pytest.mark.parametrize("text", ["", "id,gpu\n", "not a table", "id,gpu,seq_len\n"])
def test_a_file_without_rows_is_refused(tmp_path, text):
    path = tmp_path / "rows.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as error:
        validate(path)
    assert error.value.code == "rows-file"
    with pytest.raises(DataError):
        validate(tmp_path / "absent.csv")


def test_no_row_of_the_open_file_is_lost():
    rows, skipped = read_rows(ROWS)
    with ROWS.open(encoding="utf-8", newline="") as file:
        total = len(list(csv.DictReader(file)))
    assert len(rows) + len(skipped) == total
    assert len(rows) > 640
    assert not [s for s in skipped if s.reason.startswith("malformed")]


# mean, median and 90th percentile of the absolute error in per cent on the open rows, all of them in the fit,
# with half a point above what was reached
REACHED = {
    "SIMUMAX": (2.4, None, None),
    "SEQPAR22": (2.4, None, None),
    "MLM21": (None, 3.3, 4.0),
    "BLOOM": (None, 4.1, 9.2),
    "MPT": (None, 2.8, 8.0),
    "NEMO2407": (None, 5.8, 9.0),
    "DGXC": (None, 3.8, 10.0),
    "MBRIDGE": (None, 4.6, 14.2),
    "TITAN": (None, 6.8, 13.5),
}


def test_reached_accuracy_holds():
    found = validate(ROWS)["sources"]
    for source, bars in REACHED.items():
        names = ("time_mean_ape", "time_median_ape", "time_p90_ape")
        for name, bar in zip(names, bars, strict=True):
            assert bar is None or found[source][name] * 100 <= bar, (source, name)
    for source, bar in {"SIMUMAX": 0.5, "BLOOM": 4.0, "TITAN": 5.0}.items():
        assert found[source]["mem_mean_ape"] * 100 <= bar, source


def test_the_page_shows_every_source_with_its_bars():
    text = page(ROWS)
    assert text.count("| SIMUMAX") >= 1
    for source in REACHED:
        assert source in text
    left_out = {row.name: row for row in accuracy_table(ROWS)}
    assert left_out["SIMUMAX"].left_out[0] < 2.5
    assert left_out["MBRIDGE MoE"].left_out[1] < 9


def test_nine_of_ten_left_out_steps_lie_in_the_band():
    rows = {r.id: r for r in read_rows(ROWS)[0] if r.measured_s}
    with (Path(bessemer.plan.__file__).parent / "data" / "left_out.csv").open(encoding="utf-8", newline="") as file:
        predicted = {line["id"]: float(line["predicted_s"]) for line in csv.DictReader(file)}
    for kind in ("dense", "moe"):
        own = [r for r in rows.values() if (r.dims.experts > 0) == (kind == "moe")]
        inside = [abs(r.measured_s / predicted[r.id] - 1) <= BANDS[kind] for r in own]
        assert sum(inside) / len(inside) >= 0.9
