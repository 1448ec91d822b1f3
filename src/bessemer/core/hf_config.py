"""Hugging Face's config.json and `ModelSpec`: the three ways across, each in a file of its own.

spec = spec_from_config(json.loads(text))       # hf_families.py: what each family's keys mean
config = config_from_spec(spec)                 # hf_export.py
spec = resolve_model(job.model)                 # resolve.py: preset, folder or keys of a job
"""

from __future__ import annotations

from bessemer.core.hf_export import config_from_spec
from bessemer.core.hf_families import DENSE_FAMILIES, FAMILIES, spec_from_config
from bessemer.core.resolve import resolve_model

__all__ = ["DENSE_FAMILIES", "FAMILIES", "config_from_spec", "resolve_model", "spec_from_config"]
