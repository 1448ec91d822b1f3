// Causal attention, forward and backward, in blocks of 64 queries by 64 keys with an online softmax
// (Dao et al. 2022, arXiv 2205.14135). The query at position p sees the keys from starts[p] to p, which is how plain
// causal attention, a sliding window and packed documents are all said; blocks that no query sees are never computed.
// Queries and keys are each a run of one sequence, which may begin elsewhere: a query that sees none of the keys gets
// a result of 0 with a logsumexp of -inf, and the backward pass takes results and logsumexp of the whole sequence.
// Inputs may be bfloat16; products and sums are float. One task is a (batch, key/value head), so that the query
// heads that share it share its packed keys and add into its gradients in a fixed order.

namespace {

constexpr int kBlock = 64;

// Where the keys are and what the queries see of them. The field order is that of `_View` in ops/attention.py.
struct View {
  const int* starts;   // of the call's first query, batch 0; null: every query sees the keys from the first on
  int64_t starts_row;  // from one sequence of the batch to the next
  int keys;
  int first_key;  // its position in the sequence
  int offset;     // position of the first query - position of the first key
};

struct Shape {
  int batch, heads, kv, queries, dim;
  View view;
  int padded_dim() const { return (dim + 31) / 32 * 32; }
  int padded_keys() const { return (view.keys + kBlock - 1) / kBlock * kBlock; }
  // keys up to the last one that any of the queries before `query` sees
  int keys_before(int query) const { return std::max(0, std::min(view.keys, query + view.offset)); }
  const int* starts(int b) const { return view.starts ? view.starts + b * view.starts_row : nullptr; }
};

// rows [count, dim] of T into float [kBlock-padded rows, ld], scaled; what lies beyond is left as it is (zero).
template <class T>
inline void pack(const T* src, int count, int dim, int64_t src_row, float scale, float* dst, int ld) {
  for (int r = 0; r < count; r++) {
    const T* s = src + r * src_row;
    float* d = dst + size_t(r) * ld;
#pragma omp simd
    for (int i = 0; i < dim; i++) d[i] = widen(s[i]) * scale;
  }
}

template <class T>
inline void pack_transposed(const T* src, int count, int dim, float* dst, int ld) {
  for (int r0 = 0; r0 < count; r0 += kLanes)
    for (int i = 0; i < dim; i++)
      for (int r = r0; r < std::min(count, r0 + kLanes); r++) dst[size_t(i) * ld + r] = widen(src[size_t(r) * dim + i]);
}

struct Range {
  int lo, hi;  // of the columns of a block that a query sees
};

inline Range visible(View view, const int* starts, int query, int key0) {
  const int lo = starts ? std::max(starts[query] - view.first_key - key0, 0) : 0;
  return {lo, std::min(std::min(query + view.offset, view.keys - 1) - key0 + 1, kBlock)};
}

// Columns of row r of a diagonal block that the products read: up to the end of its tile of 8 rows.
inline int read_width(int r) { return r / 8 * 8 + 8; }

inline int first_block(View view, const int* starts, int query0, int count) {
  if (!starts) return 0;
  int lo = starts[query0];
  for (int r = 1; r < count; r++) lo = std::min(lo, starts[query0 + r]);
  return std::max(lo - view.first_key, 0) / kBlock;
}

// The three products of a block pair. On the diagonal, what lies above it is zero or never read: tiles there are left
// out, which is most of a third of the work of a sequence of a few blocks.

// p[query, key] = a[query, :] . bt[:, key]
inline void scores(bool diagonal, int d, const float* a, const float* bt, int ldb, float* p) {
  for (int m = 0; m < kBlock; m += 8)
    for (int n = 0; n < (diagonal ? m + 8 : kBlock); n += 32)
      product_tile<8>(d, a + m * d, d, 1, bt + n, ldb, p + m * kBlock + n, kBlock, false);
}

// c[query, :] += sum over keys of p[query, key] b[key, :]
inline void by_query(bool diagonal, int d, const float* p, const float* b, float* c) {
  for (int n = 0; n < d; n += 32)
    for (int m = 0; m < kBlock; m += 8)
      product_tile<8>(diagonal ? m + 8 : kBlock, p + m * kBlock, kBlock, 1, b + n, d, c + m * d + n, d, true);
}

// c[key, :] += sum over queries of p[query, key] b[query, :]
inline void by_key(bool diagonal, int d, const float* p, const float* b, float* c) {
  for (int n = 0; n < d; n += 32)
    for (int m = 0; m < kBlock; m += 8) {
      const int from = diagonal ? m : 0;
      product_tile<8>(kBlock - from, p + from * kBlock + m, 1, kBlock, b + from * d + n, d, c + m * d + n, d, true);
    }
}

// One row of the online softmax: scores -> exp(score - new maximum) outside of [lo, hi) zero; returns the factor
// by which what was summed before shrinks.
inline float softmax_row(float* s, Range see, int width, float& top, float& sum) {
  float now = top;
#pragma omp simd reduction(max : now)
  for (int j = see.lo; j < see.hi; j++) now = s[j] > now ? s[j] : now;
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int j = 0; j < width; j++) {
    const float e = fast_exp(s[j] - now);
    s[j] = (j >= see.lo && j < see.hi) ? e : 0.0f;
    total += s[j];
  }
  const float shrink = top == -INFINITY ? 0.0f : fast_exp(top - now);
  sum = sum * shrink + total;
  top = now;
  return shrink;
}

template <class T, class O>
void attend_task(const T* q, const T* k, const T* v, O* out, float* lse, Shape s, float scale, int b, int kv,
                 std::vector<float>& scratch) {
  const int d = s.padded_dim(), n = s.padded_keys(), group = s.heads / s.kv, used = s.keys_before(s.queries);
  scratch.assign(size_t(2) * n * d + 2 * kBlock * d + kBlock * kBlock, 0.0f);
  float *kt = scratch.data(), *vf = kt + size_t(n) * d, *qf = vf + size_t(n) * d, *o = qf + kBlock * d,
        *p = o + kBlock * d;
  const size_t at = (size_t(b) * s.kv + kv) * s.view.keys * s.dim;
  pack_transposed(k + at, used, s.dim, kt, n);
  pack(v + at, used, s.dim, s.dim, 1.0f, vf, d);
  const int* starts = s.starts(b);
  for (int h = kv * group; h < (kv + 1) * group; h++)
    for (int i0 = 0; i0 < s.queries; i0 += kBlock) {
      const int rows = std::min(kBlock, s.queries - i0);
      float top[kBlock], sum[kBlock];
      std::fill(top, top + kBlock, -INFINITY);
      std::fill(sum, sum + kBlock, 0.0f);
      std::fill(o, o + kBlock * d, 0.0f);
      pack(q + ((size_t(b) * s.heads + h) * s.queries + i0) * s.dim, rows, s.dim, s.dim, scale, qf, d);
      const int end = s.keys_before(i0 + rows);
      for (int j0 = first_block(s.view, starts, i0, rows) * kBlock; j0 < end; j0 += kBlock) {
        const bool diagonal = j0 == i0 + s.view.offset;
        scores(diagonal, d, qf, kt + j0, n, p);
        for (int r = 0; r < kBlock; r++) {
          const Range see = r < rows ? visible(s.view, starts, i0 + r, j0) : Range{0, 0};
          if (see.lo >= see.hi) {
            std::fill(p + r * kBlock, p + (r + 1) * kBlock, 0.0f);
            continue;
          }
          const float shrink = softmax_row(p + r * kBlock, see, diagonal ? read_width(r) : kBlock, top[r], sum[r]);
          float* orow = o + r * d;
#pragma omp simd
          for (int i = 0; i < d; i++) orow[i] *= shrink;
        }
        by_query(diagonal, d, p, vf + size_t(j0) * d, o);
      }
      for (int r = 0; r < rows; r++) {
        const float inverse = sum[r] == 0.0f ? 0.0f : 1.0f / sum[r];
        for (int i = 0; i < d; i++) o[r * d + i] *= inverse;
        store_row(o + r * d, out + ((size_t(b) * s.queries + i0 + r) * s.heads + h) * s.dim, s.dim);
        lse[(size_t(b) * s.heads + h) * s.queries + i0 + r] = top[r] + std::log(sum[r]);
      }
    }
}

// p: scores -> probabilities from the stored logsumexp; dp -> gradient of the scores, p (dp - delta).
inline void probability_row(float* p, Range see, int width, float lse) {
#pragma omp simd
  for (int j = 0; j < width; j++) {
    const float e = fast_exp(p[j] - lse);
    p[j] = (j >= see.lo && j < see.hi) ? e : 0.0f;
  }
}

template <class T, class O>
void attend_backward_task(const T* go, const T* q, const T* k, const T* v, const T* out, const float* lse, O* dq, O* dk,
                          O* dv, Shape s, float scale, int b, int kv, std::vector<float>& scratch) {
  const int d = s.padded_dim(), n = s.padded_keys(), group = s.heads / s.kv, used = s.keys_before(s.queries);
  const size_t panel = size_t(n) * d;
  scratch.assign(5 * panel + 3 * kBlock * d + 2 * kBlock * kBlock, 0.0f);
  float *kt = scratch.data(), *vt = kt + panel, *kf = vt + panel, *gk = kf + panel, *gv = gk + panel, *qf = gv + panel,
        *gof = qf + kBlock * d, *gq = gof + kBlock * d, *p = gq + kBlock * d, *ds = p + kBlock * kBlock;
  const size_t at = (size_t(b) * s.kv + kv) * s.view.keys * s.dim;
  pack_transposed(k + at, used, s.dim, kt, n);
  pack_transposed(v + at, used, s.dim, vt, n);
  pack(k + at, used, s.dim, s.dim, 1.0f, kf, d);
  const int* starts = s.starts(b);
  for (int h = kv * group; h < (kv + 1) * group; h++)
    for (int i0 = 0; i0 < s.queries; i0 += kBlock) {
      const int rows = std::min(kBlock, s.queries - i0);
      const size_t q_at = ((size_t(b) * s.heads + h) * s.queries + i0) * s.dim;
      const size_t o_at = ((size_t(b) * s.queries + i0) * s.heads + h) * s.dim;
      float delta[kBlock];
      std::fill(gof, gof + kBlock * d, 0.0f);
      std::fill(qf, qf + kBlock * d, 0.0f);
      std::fill(gq, gq + kBlock * d, 0.0f);
      pack(q + q_at, rows, s.dim, s.dim, scale, qf, d);
      pack(go + o_at, rows, s.dim, int64_t(s.heads) * s.dim, 1.0f, gof, d);
      for (int r = 0; r < rows; r++) {
        const T* o = out + o_at + size_t(r) * s.heads * s.dim;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < s.dim; i++) sum += gof[r * d + i] * widen(o[i]);
        delta[r] = sum;
      }
      const float* row_lse = lse + (size_t(b) * s.heads + h) * s.queries + i0;
      const int end = s.keys_before(i0 + rows);
      for (int j0 = first_block(s.view, starts, i0, rows) * kBlock; j0 < end; j0 += kBlock) {
        const bool diagonal = j0 == i0 + s.view.offset;
        scores(diagonal, d, qf, kt + j0, n, p);
        scores(diagonal, d, gof, vt + j0, n, ds);
        for (int r = 0; r < kBlock; r++) {
          const Range see = r < rows ? visible(s.view, starts, i0 + r, j0) : Range{0, 0};
          float *pr = p + r * kBlock, *dr = ds + r * kBlock;
          if (see.lo >= see.hi) {
            std::fill(pr, pr + kBlock, 0.0f);
            std::fill(dr, dr + kBlock, 0.0f);
            continue;
          }
          const int width = diagonal ? read_width(r) : kBlock;
          probability_row(pr, see, width, row_lse[r]);
#pragma omp simd
          for (int j = 0; j < width; j++) dr[j] = pr[j] * (dr[j] - delta[r]);
        }
        by_key(diagonal, d, p, gof, gv + size_t(j0) * d);
        by_query(diagonal, d, ds, kf + size_t(j0) * d, gq);
        by_key(diagonal, d, ds, qf, gk + size_t(j0) * d);
      }
      for (int r = 0; r < rows; r++) {
        for (int i = 0; i < d; i++) gq[r * d + i] *= scale;
        store_row(gq + r * d, dq + q_at + size_t(r) * s.dim, s.dim);
      }
    }
  for (int r = 0; r < s.view.keys; r++) {
    store_row(gk + size_t(r) * d, dk + at + size_t(r) * s.dim, s.dim);
    store_row(gv + size_t(r) * d, dv + at + size_t(r) * s.dim, s.dim);
  }
}

// Calls f(T*, O*) with the types of inputs and results: both float32 (0), both bfloat16 (1), bfloat16 in and float32
// out (2).
template <class F>
inline void typed_pair(int types, F f) {
  if (types == 0) f((const float*)nullptr, (float*)nullptr);
  if (types == 1) f((const bf16*)nullptr, (bf16*)nullptr);
  if (types == 2) f((const bf16*)nullptr, (float*)nullptr);
}

}  // namespace

extern "C" {

void bessemer_attend(const void* q, const void* k, const void* v, int types, const View* view, void* out, float* lse,
                     int batch, int heads, int kv, int queries, int dim, float scale, int threads) {
  const Shape s{batch, heads, kv, queries, dim, *view};
  typed_pair(types, [&](auto* in, auto* made) {
    using T = decltype(in);
    using O = decltype(made);
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> scratch;
#pragma omp for schedule(dynamic)
      for (int t = 0; t < batch * kv; t++)
        attend_task((T)q, (T)k, (T)v, (O)out, lse, s, scale, t / kv, t % kv, scratch);
    }
  });
}

void bessemer_attend_backward(const void* go, const void* q, const void* k, const void* v, const void* out,
                              const float* lse, int types, const View* view, void* dq, void* dk, void* dv, int batch,
                              int heads, int kv, int queries, int dim, float scale, int threads) {
  const Shape s{batch, heads, kv, queries, dim, *view};
  typed_pair(types, [&](auto* in, auto* made) {
    using T = decltype(in);
    using O = decltype(made);
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> scratch;
#pragma omp for schedule(dynamic)
      for (int t = 0; t < batch * kv; t++)
        attend_backward_task((T)go, (T)q, (T)k, (T)v, (T)out, lse, (O)dq, (O)dk, (O)dv, s, scale, t / kv, t % kv,
                             scratch);
    }
  });
}
}
