"""Bessemer: an AI foundry on PyTorch. `bessemer.api` holds one public function for each verb."""

__all__ = ["__version__"]
__version__ = "0.1.0"
