// Memory-bound operators, each one pass over its data: add + RMSNorm, split + qk-norm + rotation, SwiGLU, and
// softmax cross-entropy with its gradient in place. Pointers may be float or bfloat16 as the flags say.

namespace {

constexpr int kMaxHead = 512;

// y = x rstd w, rstd = (mean(x^2) + eps)^-1/2, for one row that is already float.
inline float inverse_rms(const float* x, int n, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int i = 0; i < n; i++) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / n + eps);
}

// Gradient of RMSNorm for one row: dx = rstd (g w - xhat mean(g w xhat)); dw += g xhat.
inline void rms_backward_row(const float* g, const float* x, const float* w, float rstd, int n, float* dx, float* dw) {
  float dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int i = 0; i < n; i++) dot += g[i] * w[i] * x[i];
  const float mean = dot * rstd * rstd / n;
#pragma omp simd
  for (int i = 0; i < n; i++) {
    dx[i] = rstd * (g[i] * w[i] - x[i] * mean);
    dw[i] += g[i] * x[i] * rstd;
  }
}

template <class X, class D, class Y>
void add_norm(const X* x, const D* delta, const float* w, X* sum, Y* y, float* rstd, int64_t rows, int n, float eps,
              int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> row(n);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      load_row(x + r * n, row.data(), n);
      if (delta) {
        const D* d = delta + r * n;
        X* s = sum + r * n;
        float* f = row.data();
#pragma omp simd
        for (int i = 0; i < n; i++) {
          narrow(f[i] + widen(d[i]), s[i]);
          f[i] = widen(s[i]);  // the norm sees what is stored, as the unfused form does
        }
      }
      const float inv = inverse_rms(row.data(), n, eps);
      rstd[r] = inv;
      const float* f = row.data();
      Y* out = y + r * n;
#pragma omp simd
      for (int i = 0; i < n; i++) narrow(f[i] * inv * w[i], out[i]);
    }
  }
}

template <class X, class D, class Y>
void add_norm_backward(const Y* gy, const X* gx, const X* x, const float* rstd, const float* w, X* dx, D* ddelta,
                       float* dw_partial, int64_t rows, int n, int threads) {
  const int64_t chunks = (rows + kRowChunk - 1) / kRowChunk;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> xr(n), gr(n), out(n);
#pragma omp for schedule(static)
    for (int64_t c = 0; c < chunks; c++) {
      float* dw = dw_partial + c * n;
      std::fill(dw, dw + n, 0.0f);
      for (int64_t r = c * kRowChunk; r < std::min(rows, (c + 1) * kRowChunk); r++) {
        load_row(x + r * n, xr.data(), n);
        load_row(gy + r * n, gr.data(), n);
        rms_backward_row(gr.data(), xr.data(), w, rstd[r], n, out.data(), dw);
        float* o = out.data();
        if (gx) {
          const X* g = gx + r * n;
#pragma omp simd
          for (int i = 0; i < n; i++) o[i] += widen(g[i]);
        }
        store_row(o, dx + r * n, n);
        if (ddelta) store_row(o, ddelta + r * n, n);
      }
    }
  }
}

struct Heads {
  int batch, seq, q, kv, dim;
  int cos_per_batch;  // 1: cos and sin are [B, S, dim/2], else [S, dim/2]
  int total() const { return q + 2 * kv; }
};

// One head: optional RMSNorm, then rotation of (x1, x2) halves by the position's angles (HF's rotate_half form).
inline void rotate(const float* x, const float* cs, const float* sn, int half, float* y) {
#pragma omp simd
  for (int i = 0; i < half; i++) {
    y[i] = x[i] * cs[i] - x[i + half] * sn[i];
    y[i + half] = x[i + half] * cs[i] + x[i] * sn[i];
  }
}

template <class T>
void split_heads(const T* qkv, const float* cs, const float* sn, const float* qw, const float* kw, T* q, T* k, T* v,
                 float* rstd, Heads s, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t token = 0; token < int64_t(s.batch) * s.seq; token++) {
    float x[kMaxHead], y[kMaxHead];
    const int64_t b = token / s.seq, i = token % s.seq;
    const int64_t angle = (s.cos_per_batch ? token : i) * (s.dim / 2);
    for (int h = 0; h < s.total(); h++) {
      const T* src = qkv + (token * s.total() + h) * s.dim;
      if (h >= s.q + s.kv) {
        std::memcpy(v + ((b * s.kv + h - s.q - s.kv) * s.seq + i) * s.dim, src, s.dim * sizeof(T));
        continue;
      }
      const bool is_q = h < s.q;
      T* dst = is_q ? q + ((b * s.q + h) * s.seq + i) * s.dim : k + ((b * s.kv + h - s.q) * s.seq + i) * s.dim;
      load_row(src, x, s.dim);
      if (qw) {
        const float inv = inverse_rms(x, s.dim, eps);
        const float* w = is_q ? qw : kw;
        rstd[token * (s.q + s.kv) + h] = inv;
        for (int j = 0; j < s.dim; j++) x[j] *= inv * w[j];
      }
      if (cs)
        rotate(x, cs + angle, sn + angle, s.dim / 2, y);
      store_row(cs ? y : x, dst, s.dim);
    }
  }
}

template <class T>
void split_heads_backward(const T* dq, const T* dk, const T* dv, const float* cs, const float* sn, const T* qkv,
                          const float* qw, const float* kw, const float* rstd, T* dqkv, float* dw_partial, Heads s,
                          int threads) {
  const int64_t tokens = int64_t(s.batch) * s.seq, chunks = (tokens + kRowChunk - 1) / kRowChunk;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t c = 0; c < chunks; c++) {
    float x[kMaxHead], g[kMaxHead], y[kMaxHead], minus[kMaxHead];
    float* dw = qw ? dw_partial + c * 2 * s.dim : nullptr;
    if (qw) std::fill(dw, dw + 2 * s.dim, 0.0f);
    for (int64_t token = c * kRowChunk; token < std::min(tokens, (c + 1) * kRowChunk); token++) {
      const int64_t b = token / s.seq, i = token % s.seq;
      const int64_t angle = (s.cos_per_batch ? token : i) * (s.dim / 2);
      if (cs)
        for (int j = 0; j < s.dim / 2; j++) minus[j] = -sn[angle + j];
      for (int h = 0; h < s.total(); h++) {
        T* dst = dqkv + (token * s.total() + h) * s.dim;
        if (h >= s.q + s.kv) {
          std::memcpy(dst, dv + ((b * s.kv + h - s.q - s.kv) * s.seq + i) * s.dim, s.dim * sizeof(T));
          continue;
        }
        const bool is_q = h < s.q;
        load_row(is_q ? dq + ((b * s.q + h) * s.seq + i) * s.dim : dk + ((b * s.kv + h - s.q) * s.seq + i) * s.dim, g,
                 s.dim);
        if (cs) {
          rotate(g, cs + angle, minus, s.dim / 2, y);  // the inverse rotation is the transpose
          std::memcpy(g, y, s.dim * sizeof(float));
        }
        if (qw) {
          load_row(qkv + (token * s.total() + h) * s.dim, x, s.dim);
          rms_backward_row(g, x, is_q ? qw : kw, rstd[token * (s.q + s.kv) + h], s.dim, y, is_q ? dw : dw + s.dim);
        }
        store_row(qw ? y : g, dst, s.dim);
      }
    }
  }
}

template <class T>
void swiglu(const T* gate_up, T* out, int64_t rows, int n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const T* gate = gate_up + r * 2 * n;
    T* y = out + r * n;
#pragma omp simd
    for (int i = 0; i < n; i++) {
      const float a = widen(gate[i]);
      narrow(a / (1.0f + fast_exp(-a)) * widen(gate[i + n]), y[i]);
    }
  }
}

template <class T>
void swiglu_backward(const T* g, const T* gate_up, T* grad, int64_t rows, int n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const T* gate = gate_up + r * 2 * n;
    const T* gr = g + r * n;
    T* d = grad + r * 2 * n;
#pragma omp simd
    for (int i = 0; i < n; i++) {
      const float a = widen(gate[i]), go = widen(gr[i]), sig = 1.0f / (1.0f + fast_exp(-a));
      narrow(go * widen(gate[i + n]) * sig * (1.0f + a * (1.0f - sig)), d[i]);
      narrow(go * a * sig, d[i + n]);
    }
  }
}

// Per row: loss = weight (logsumexp - x[label]); with `grad`, x becomes weight (softmax - onehot).
template <class T>
void cross_entropy(T* logits, const int64_t* labels, const float* weights, float* loss, int64_t rows, int n, int grad,
                   int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> row(n);
    float* e = row.data();
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      T* x = logits + r * n;
      const float weight = weights[r];
      if (weight == 0.0f) {  // an ignored token: nothing of its row may leak, not even a NaN
        loss[r] = 0.0f;
        if (grad) std::memset(x, 0, n * sizeof(T));
        continue;
      }
      load_row(x, e, n);
      float top = e[0], sum = 0;
#pragma omp simd reduction(max : top)
      for (int i = 0; i < n; i++) top = e[i] > top ? e[i] : top;
      const float at_label = e[labels[r]];
#pragma omp simd reduction(+ : sum)
      for (int i = 0; i < n; i++) {
        e[i] = fast_exp(e[i] - top);
        sum += e[i];
      }
      loss[r] = weight * (top + std::log(sum) - at_label);
      if (!grad) continue;
      const float scale = weight / sum;
      const float p_label = e[labels[r]] * scale - weight;
#pragma omp simd
      for (int i = 0; i < n; i++) narrow(e[i] * scale, x[i]);
      narrow(p_label, x[labels[r]]);
    }
  }
}

}  // namespace

extern "C" {

void bessemer_add_norm(const void* x, int x16, const void* delta, int d16, const float* w, void* sum, void* y, int y16,
                       float* rstd, int64_t rows, int n, float eps, int threads) {
  typed(x, x16, [&](auto* xp) {
    typed(delta, d16, [&](auto* dp) {
      typed(y, y16, [&](auto* yp) {
        add_norm(xp, dp, w, (std::remove_const_t<std::remove_pointer_t<decltype(xp)>>*)sum, yp, rstd, rows, n, eps,
                 threads);
      });
    });
  });
}

void bessemer_add_norm_backward(const void* gy, int y16, const void* gx, const void* x, int x16, const float* rstd,
                                const float* w, void* dx, void* ddelta, int d16, float* dw_partial, int64_t rows, int n,
                                int threads) {
  typed(dx, x16, [&](auto* xp) {
    typed(ddelta, d16, [&](auto* dp) {
      typed(gy, y16, [&](auto* yp) {
        add_norm_backward(yp, (decltype(xp))gx, (decltype(xp))x, rstd, w, xp, dp, dw_partial, rows, n, threads);
      });
    });
  });
}

void bessemer_split_heads(const void* qkv, int b16, const float* cs, const float* sn, const float* qw, const float* kw,
                          void* q, void* k, void* v, float* rstd, int batch, int seq, int heads, int kv, int dim,
                          int cos_per_batch, float eps, int threads) {
  typed(q, b16, [&](auto* qp) {
    using P = decltype(qp);
    split_heads((P)qkv, cs, sn, qw, kw, qp, (P)k, (P)v, rstd, {batch, seq, heads, kv, dim, cos_per_batch}, eps,
                threads);
  });
}

void bessemer_split_heads_backward(const void* dq, const void* dk, const void* dv, int b16, const float* cs,
                                   const float* sn, const void* qkv, const float* qw, const float* kw,
                                   const float* rstd, void* dqkv, float* dw_partial, int batch, int seq, int heads,
                                   int kv, int dim, int cos_per_batch, int threads) {
  typed(dqkv, b16, [&](auto* dp) {
    using P = decltype(dp);
    split_heads_backward((P)dq, (P)dk, (P)dv, cs, sn, (P)qkv, qw, kw, rstd, dp, dw_partial,
                         {batch, seq, heads, kv, dim, cos_per_batch}, threads);
  });
}

void bessemer_swiglu(const void* gate_up, void* out, int b16, int64_t rows, int n, int threads) {
  typed(out, b16, [&](auto* p) { swiglu((decltype(p))gate_up, p, rows, n, threads); });
}

void bessemer_swiglu_backward(const void* g, const void* gate_up, void* grad, int b16, int64_t rows, int n,
                              int threads) {
  typed(grad, b16, [&](auto* p) { swiglu_backward((decltype(p))g, (decltype(p))gate_up, p, rows, n, threads); });
}

void bessemer_cross_entropy(void* logits, int b16, const int64_t* labels, const float* weights, float* loss,
                            int64_t rows, int n, int grad, int threads) {
  typed(logits, b16, [&](auto* p) { cross_entropy(p, labels, weights, loss, rows, n, grad, threads); });
}
}
