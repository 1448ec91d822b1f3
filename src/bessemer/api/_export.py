"""The verb `export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bessemer.api._extras import need
from bessemer.core.errors import RequestError

__all__ = ["ExportResult", "export"]


@dataclass(frozen=True)
class ExportResult:
    """The written folder, which `transformers` loads as it is."""

    folder: str
    step: int
    tensors: int
    bytes: int
    dtype: str

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __str__(self) -> str:
        return (
            f"wrote {self.folder}: the model at step {self.step}, {self.tensors} tensors, "
            f"{self.bytes / 1e6:.1f} MB in {self.dtype}\n"
            f"  transformers.AutoModelForCausalLM.from_pretrained({self.folder!r}) loads it"
        )


def export(run: str, *, to: str, dtype: Literal["fp32", "bf16", "fp16"] = "bf16") -> ExportResult:
    """Write a trained model as a Hugging Face folder: config, tokenizer and safetensors.

    run: A run folder (its newest checkpoint that verifies) or a checkpoint folder.
    to: The folder to write; it must not exist yet.
    dtype: The type of the written weights; fp32 is bit for bit what was trained.
    """
    need("export", "train")
    import torch

    from bessemer.data.tokenizers import FileTokenizer
    from bessemer.models.hf import export_hf
    from bessemer.train.opened import open_trained
    from bessemer.train.state import OPTIMIZER_PREFIX

    folder = Path(to)
    if folder.exists():
        raise RequestError(f"{folder} exists already", code="exists", fix=f"--to {folder}-2, or remove {folder}")
    trained = open_trained(run)
    names = [n for n in trained.checkpoint.names() if not n.startswith(OPTIMIZER_PREFIX)]
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    export_hf(
        trained.spec,
        ((name, trained.checkpoint.read_tensor(name)) for name in names),
        folder,
        dtype=types[dtype],
        tokenizer_json=trained.tokenizer_file.read_text(encoding="utf-8"),
        eos_token=FileTokenizer(trained.tokenizer_file).eos_token,
    )
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    return ExportResult(to, trained.step, len(names), size, dtype)
