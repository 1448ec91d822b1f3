"""Narrow formats, scaling, and the linear layer that trains in them: emulated exactly on a CPU."""

from bessemer.precision.casts import decode, encode, keyed_generator, pack, unpack
from bessemer.precision.delayed import advance, reference_amax
from bessemer.precision.formats import FORMATS, Format
from bessemer.precision.kept import kept_swiglu, swiglu_again
from bessemer.precision.linear import ROLES, Call, QuantLinear, quant_linear
from bessemer.precision.numerics import INT8_WEIGHT, Numerics, numerics
from bessemer.precision.product import multiply, promoted
from bessemer.precision.products import QuantProducts
from bessemer.precision.scaled import Grain, Scaled, Scheme, quantise
from bessemer.precision.smooth import channel_scales, fold

__all__ = [
    "FORMATS",
    "INT8_WEIGHT",
    "ROLES",
    "Call",
    "Format",
    "Grain",
    "Numerics",
    "QuantLinear",
    "QuantProducts",
    "Scaled",
    "Scheme",
    "advance",
    "channel_scales",
    "decode",
    "encode",
    "fold",
    "kept_swiglu",
    "keyed_generator",
    "multiply",
    "numerics",
    "pack",
    "promoted",
    "quant_linear",
    "quantise",
    "reference_amax",
    "swiglu_again",
    "unpack",
]
