// What the kernels share: bfloat16 conversion, exp, rows in either type, and the small matrix product.
// Loops are written so that the compiler vectorises them; there are no intrinsics and no torch headers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

typedef float vec __attribute__((vector_size(64)));  // 16 floats; narrower machines get it as several registers
constexpr int kLanes = 16;
constexpr int kRowChunk = 64;  // rows summed into one partial, whatever the number of threads: same bits for any

struct bf16 {
  uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline void narrow(float x, float& out) { out = x; }

// Round to nearest even; a NaN stays a NaN, so that a broken step is still seen by the loop's check.
inline void narrow(float x, bf16& out) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  out.bits = uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// exp by range reduction to [-ln2/2, ln2/2] and a polynomial of degree 6 (relative error below 2e-7).
// Arguments below -87 give about 1e-38; NaN stays NaN.
inline float fast_exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer kept in the low bits
  float t = x * 1.44269504f + magic;
  float n = t - magic;
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits, scale;
  std::memcpy(&bits, &t, 4);
  scale = (bits + 127u) << 23;  // the low bits of t hold n; the shift drops the rest
  float s;
  std::memcpy(&s, &scale, 4);
  return p * s;
}

template <class T>
inline void load_row(const T* src, float* dst, int n) {
#pragma omp simd
  for (int i = 0; i < n; i++) dst[i] = widen(src[i]);
}

template <class T>
inline void store_row(const float* src, T* dst, int n) {
#pragma omp simd
  for (int i = 0; i < n; i++) narrow(src[i], dst[i]);
}

// C[MR, 32] (+)= A[MR, K] B[K, 32]; A is read at a[m * row + k * col], so a transposed A costs nothing more.
template <int MR>
inline void product_tile(int K, const float* a, int row, int col, const float* b, int ldb, float* c, int ldc,
                         bool accumulate) {
  vec acc[MR][2];
  for (int m = 0; m < MR; m++)
    for (int v = 0; v < 2; v++) {
      if (accumulate)
        std::memcpy(&acc[m][v], c + m * ldc + v * kLanes, sizeof(vec));
      else
        acc[m][v] = vec{};
    }
  for (int k = 0; k < K; k++) {
    vec b0, b1;
    std::memcpy(&b0, b + size_t(k) * ldb, sizeof(vec));
    std::memcpy(&b1, b + size_t(k) * ldb + kLanes, sizeof(vec));
    for (int m = 0; m < MR; m++) {
      float s = a[m * row + k * col];
      acc[m][0] += s * b0;
      acc[m][1] += s * b1;
    }
  }
  for (int m = 0; m < MR; m++)
    for (int v = 0; v < 2; v++) std::memcpy(c + m * ldc + v * kLanes, &acc[m][v], sizeof(vec));
}

// Calls f(T*) with the pointer's real type.
template <class F>
inline void typed(void* p, int is_bf16, F f) {
  if (is_bf16)
    f(static_cast<bf16*>(p));
  else
    f(static_cast<float*>(p));
}

template <class F>
inline void typed(const void* p, int is_bf16, F f) {
  if (is_bf16)
    f(static_cast<const bf16*>(p));
  else
    f(static_cast<const float*>(p));
}

}  // namespace
