// The one translation unit of the CPU kernels: `ops/native.py` compiles this file, which takes in the others.
#include "vector.cpp"

#include "pointwise.cpp"

#include "narrow.cpp"

#include "attention.cpp"
