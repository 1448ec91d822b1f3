// Casts to and from narrow float formats under a scale per tile, and the largest size in each tile. A tile is `tall`
// rows by `wide` columns, ragged at the edges; tiles are numbered along a row of them first.

namespace {

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline uint32_t size_bits(float x) { return bits_of(x) & 0x7fffffffu; }
inline uint32_t size_bits(bf16 x) { return uint32_t(x.bits & 0x7fffu) << 16; }

// Calls f with the length of a run, as a constant where that is short: only then does the compiler fill its vectors.
template <class F>
inline void run_of(int64_t n, F f) {
  if (n == 16)
    f(std::integral_constant<int64_t, 16>{});
  else if (n == 32)
    f(std::integral_constant<int64_t, 32>{});
  else
    f(n);
}

// As integers sizes have the order of the numbers, with NaN above Inf: neither is lost.
template <class X>
void tile_amax(const X* x, float* amax, int64_t rows, int64_t cols, int64_t tall, int64_t wide, int threads) {
  const int64_t down = (rows + tall - 1) / tall, across = (cols + wide - 1) / wide;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t a = 0; a < down; a++)
    for (int64_t b = 0; b < across; b++) {
      uint32_t most = 0;
      run_of(std::min(wide, cols - b * wide), [&](auto n) {
        for (int64_t r = a * tall; r < std::min(rows, (a + 1) * tall); r++) {
          const X* row = x + r * cols + b * wide;
#pragma omp simd reduction(max : most)
          for (int64_t c = 0; c < int64_t(n); c++) most = std::max(most, size_bits(row[c]));
        }
      });
      amax[a * across + b] = float_of(most);
    }
}

// What torch makes of NaN: of a float its own sign, or that of the scale; of a bfloat16 always the last code.
inline uint32_t nan_code(float x, float) { return 0x7fu | (x != x ? bits_of(x) >> 24 & 0x80u : 0u); }
inline uint32_t nan_code(float, bf16) { return 0xffu; }

// One number over its scale as a code: rounded to nearest, ties to even, or up where `noise` in [0, 1) is below what
// the floor leaves. `quotient` has the sign, and is in the type of x.
template <int BITS, int MANTISSA, int BIAS, bool STOCHASTIC>
inline uint32_t code_of(float quotient, float largest, float noise) {
  const uint32_t sign = bits_of(quotient) >> 31 << (BITS - 1);
  float size = float_of(size_bits(quotient));
  size = size > largest ? largest : size;
  // the exponent's field in the code, 0 also for subnormals, and the number of steps at that exponent
  const int32_t field = std::max(int32_t(bits_of(size) >> 23) - (127 + 1 - BIAS), 0);
  const float steps = size * float_of(uint32_t(127 + MANTISSA - (field + 1 - BIAS)) << 23);
  uint32_t whole;
  if (STOCHASTIC) {
    const int32_t floor = int32_t(steps);
    whole = uint32_t(floor) + (noise < steps - float(floor) ? 1u : 0u);
  } else {
    whole = bits_of(steps + 12582912.0f) & 0xffu;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  }
  return sign | ((uint32_t(field) << MANTISSA) + whole);  // a carry of the mantissa moves the exponent on
}

template <class X, int BITS, int MANTISSA, int BIAS, bool STOCHASTIC, class N>
inline void encode_run(const X* x, uint8_t* codes, const float* noise, N n, float scale, float largest) {
  const auto encode = [&](float quotient, int64_t i) {
    const uint32_t code =
        code_of<BITS, MANTISSA, BIAS, STOCHASTIC>(quotient, largest, STOCHASTIC ? noise[i] : 0.0f);
    codes[i] = uint8_t(quotient != quotient ? nan_code(widen(x[i]), X{}) & ((1u << BITS) - 1) : code);
  };
  if ((bits_of(scale) & 0x7fffffu) == 0 && scale < 1e30f) {  // the inverse is exact, and so is the quotient
    const float inverse = 1.0f / scale;
#pragma omp simd
    for (int64_t i = 0; i < int64_t(n); i++) encode(widen(x[i]) * inverse, i);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < int64_t(n); i++) {
      X rounded;
      narrow(widen(x[i]) / scale, rounded);
      encode(widen(rounded), i);
    }
  }
}

template <class X, int BITS, int MANTISSA, int BIAS>
void encode_tiles(const X* x, const float* scale, const float* noise, uint8_t* codes, int64_t rows, int64_t cols,
                  int64_t tall, int64_t wide, float largest, int threads) {
  const int64_t across = (cols + wide - 1) / wide;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t b = 0; b < across; b++) {
      const int64_t at = r * cols + b * wide;
      const float s = scale[r / tall * across + b];
      run_of(std::min(wide, cols - b * wide), [&](auto n) {
        if (noise)
          encode_run<X, BITS, MANTISSA, BIAS, true>(x + at, codes + at, noise + at, n, s, largest);
        else
          encode_run<X, BITS, MANTISSA, BIAS, false>(x + at, codes + at, noise, n, s, largest);
      });
    }
}

// Codes are finite wherever their scale is, as in `casts.decode_finite`.
template <int BITS, int MANTISSA, int BIAS>
void decode_tiles(const uint8_t* codes, const float* scale, bf16* out, int64_t rows, int64_t cols, int64_t tall,
                  int64_t wide, int threads) {
  const int64_t across = (cols + wide - 1) / wide;
  const float mend = float_of(uint32_t(127 + 127 - BIAS) << 23);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t b = 0; b < across; b++) {
      const int64_t at = r * cols + b * wide;
      const float s = scale[r / tall * across + b];
      run_of(std::min(wide, cols - b * wide), [&](auto n) {
#pragma omp simd
        for (int64_t i = 0; i < int64_t(n); i++) {
          const uint32_t code = codes[at + i];
          const uint32_t size = (code & ((1u << (BITS - 1)) - 1)) << (23 - MANTISSA);
          narrow(float_of(code >> (BITS - 1) << 31 | size) * mend * s, out[at + i]);
        }
      });
    }
}

enum Narrow { kE4M3, kE5M2, kE2M1 };

}  // namespace

extern "C" {

void bessemer_tile_amax(const void* x, int x_bf16, float* amax, int64_t rows, int64_t cols, int64_t tall, int64_t wide,
                        int threads) {
  typed(x, x_bf16, [&](auto* p) { tile_amax(p, amax, rows, cols, tall, wide, threads); });
}

void bessemer_encode_tiles(const void* x, int x_bf16, const float* scale, const float* noise, uint8_t* codes, int format,
                           int64_t rows, int64_t cols, int64_t tall, int64_t wide, int threads) {
  typed(x, x_bf16, [&](auto* p) {
    using X = std::remove_const_t<std::remove_pointer_t<decltype(p)>>;
    if (format == kE4M3)
      encode_tiles<X, 8, 3, 7>(p, scale, noise, codes, rows, cols, tall, wide, 448.0f, threads);
    else if (format == kE5M2)
      encode_tiles<X, 8, 2, 15>(p, scale, noise, codes, rows, cols, tall, wide, 57344.0f, threads);
    else
      encode_tiles<X, 4, 1, 1>(p, scale, noise, codes, rows, cols, tall, wide, 6.0f, threads);
  });
}

void bessemer_decode_tiles(const uint8_t* codes, const float* scale, void* out, int format, int64_t rows, int64_t cols,
                           int64_t tall, int64_t wide, int threads) {
  bf16* to = static_cast<bf16*>(out);
  if (format == kE4M3)
    decode_tiles<8, 3, 7>(codes, scale, to, rows, cols, tall, wide, threads);
  else if (format == kE5M2)
    decode_tiles<8, 2, 15>(codes, scale, to, rows, cols, tall, wide, threads);
  else
    decode_tiles<4, 1, 1>(codes, scale, to, rows, cols, tall, wide, threads);
}

}  // extern "C"
