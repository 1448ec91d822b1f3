"""The verb `export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bessemer.api._extras import need
from bessemer.core.errors import RequestError
from bessemer.core.units import counted

if TYPE_CHECKING:
    from torch import Tensor

    from bessemer.train.opened import Trained

__all__ = ["ExportResult", "export"]


@dataclass(frozen=True)
class ExportResult:
    """The written folder, which `transformers` loads as it is."""

    folder: str
    step: int
    tensors: int
    bytes: int
    dtype: str
    folded: int

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __str__(self) -> str:
        return (
            f"wrote {self.folder}: the model at step {self.step}, {self.tensors} tensors, "
            f"{self.bytes / 1e6:.1f} MB in {self.dtype}\n"
            + (f"  {counted(self.folded, 'down projection')} smoothed\n" if self.folded else "")
            + f"  transformers.AutoModelForCausalLM.from_pretrained({self.folder!r}) loads it"
        )


def export(
    run: str, *, to: str, dtype: Literal["fp32", "bf16", "fp16"] = "bf16", smooth_fold: bool = False
) -> ExportResult:
    """Write a trained model as a Hugging Face folder: config, tokenizer and safetensors.

    run: A run folder (its newest checkpoint that verifies) or a checkpoint folder.
    to: The folder to write; it must not exist yet.
    dtype: The type of the written weights; fp32 is bit for bit what was trained.
    smooth_fold: Fold Smooth-SwiGLU's scales into the up and down projections: the same function bit for bit, and what
        enters a down projection fits one scale of FP8. The channels are looked at on validation sequences.
    """
    need("export", "train")
    import torch

    from bessemer.data.tokenizers import FileTokenizer
    from bessemer.models.folding import folded_state
    from bessemer.models.hf import export_hf
    from bessemer.train.opened import open_trained
    from bessemer.train.state import FALL_BACK_PREFIX, HISTORY_PREFIX, OPTIMIZER_PREFIX

    folder = Path(to)
    if folder.exists():
        raise RequestError(f"{folder} exists already", code="exists", fix=f"--to {folder}-2, or remove {folder}")
    trained = open_trained(run)
    beside = (OPTIMIZER_PREFIX, HISTORY_PREFIX, FALL_BACK_PREFIX)
    names = [n for n in trained.checkpoint.names() if not n.startswith(beside)]
    written = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    scales = _down_scales(trained) if smooth_fold else {}
    state = ((name, trained.checkpoint.read_tensor(name)) for name in names)
    export_hf(
        trained.spec,
        folded_state(state, scales, written),
        folder,
        dtype=written,
        tokenizer_json=trained.tokenizer_file.read_text(encoding="utf-8"),
        eos_token=FileTokenizer(trained.tokenizer_file).eos_token,
    )
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    return ExportResult(to, trained.step, len(names), size, dtype, len(scales))


def _down_scales(trained: Trained) -> dict[str, Tensor]:
    """By down projection the scales of its channels, from as many validation sequences as the job evaluates."""
    import torch

    from bessemer.data import open_dataset, prepare
    from bessemer.models.folding import down_scales
    from bessemer.parallel.mesh import Mesh
    from bessemer.train.evaluate import WholeModel, evaluate

    if not trained.spec.gated:
        what = f"the feed-forward of {trained.spec.family} has no gate, so that there is nothing to smooth"
        raise RequestError(what, code="fold-gate", fix="export without --smooth-fold")
    prepare(trained.job)
    dataset, module, train = open_dataset(trained.job, "val"), trained.module(), trained.job.train
    whole = WholeModel(module, Mesh.alone(torch.device("cpu")))

    def run() -> None:
        evaluate(whole, dataset, sequences=train.eval_sequences, micro_batch=train.micro_batch)

    return down_scales(module, run)
