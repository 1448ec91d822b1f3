"""Generation: the key/value cache, sampling, and the loop over tokens."""

from bessemer.infer.cache import KvCache
from bessemer.infer.generate import generate
from bessemer.infer.latent import LatentCache
from bessemer.infer.sampling import Sampling, probabilities, sample

__all__ = ["KvCache", "LatentCache", "Sampling", "generate", "probabilities", "sample"]
