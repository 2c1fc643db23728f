// Gradients of the scan of native.cpp: the states of SEGMENT chunks are computed again, then its chunks from the last
// one back, with g [P, N] the gradient of the state behind a chunk.
//
// Notation and rounding as there; d is the gradient of y, and the orders of sums are those of chunk.h. For one head,
// with z the last row of a chunk, M_ts = ((C_t . B_s) e(L_t - L_s)) dt_s and Q_ts = x_s . d_t:
//
//   u_s   = B_s . g_p for each p;  v_t = sum over p of (e(L_t) d_tp) h_p
//   x_s:  fma(D, d_s, the sum over t >= s of M_ts d_t on top of w_s u_s)
//   C_t:  the heads' v_t, then the sum over s of T_ts B_s, where T_ts is the heads' sum of (e(L_t - L_s) dt_s) Q_ts
//   B_s:  the heads' sums over p of (w_s x_sp) g_p, then the sum over t of T_ts C_t
//   D:    Q_tt of every token
//
// A dt_r is in exp(L_t - L_s) for s < r <= t. Its gradient is added up from the terms that contain it, and not as a
// difference of sums over L, which would lose what the gradients of A and dt are made of:
//
//   l_r   = sum over t >= r of (the sum over s < r of M_ts Q_ts, plus v_t . C_t)
//           + (e(L_z) h . g, plus the sum over s < r of w_s (x_s . u_s))
//   A:    dt_r l_r of every token
//   dt_r: fma(A, l_r, fma(e(L_z - L_r), x_r . u_r, the sum over t of ((C_t . B_r) e(L_t - L_r)) Q_tr))
//   g'    = the sum over t of (e(L_t) d_tp) C_t on top of e(L_z) g_p, before the chunk
//
// Sums over t are 32 numbers by halves, of which those that do not belong are zeros. Everything of a group comes from
// its own numbers, and of a document from its own.

#include "chunk.h"

namespace {

typedef Integers Mask;

inline float total(Vector x) {
  for (int half = LANES / 2; half; half /= 2)
    for (int l = 0; l < half; ++l) x[l] += x[l + half];
  return x[0];
}

// a . b of rows of CHUNK, all of them.
inline void row_dots(const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t n, float* out) {
  for (int64_t t = 0; t < CHUNK; t += LANES) {
    Vector sums[LANES] = {};
    for (int64_t i = 0; i < n; i += LANES)
      for (int r = 0; r < LANES; ++r)
        sums[r] = fma(load_some(a + (t + r) * a_row + i, n - i), load_some(b + (t + r) * b_row + i, n - i), sums[r]);
    store(out + t, totals(sums));
  }
}

// Sum of products of n numbers, a multiple of 64, in four vectors.
inline float inner(const float* a, const float* b, int64_t n) {
  Vector sums[4] = {};
  for (int64_t i = 0; i < n; i += 4 * LANES)
    for (int w = 0; w < 4; ++w) sums[w] = fma(load(a + i + w * LANES), load(b + i + w * LANES), sums[w]);
  return total((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename T>
class Backward : Chunk<T> {
  using Base = Chunk<T>;
  using Base::B, Base::C, Base::L, Base::N, Base::P, Base::c, Base::dt, Base::j, Base::row, Base::state_size,
      Base::take, Base::weighted, Base::weights, Base::wide, Base::x;

 public:
  explicit Backward(const Call& c)
      : Base(c, CHUNK * (c.heads / c.groups * c.dim + 5 * CHUNK + 2 * c.dim + LANES + 3 * c.size + 3) + 2 * LANES +
                    c.dim + c.heads / c.groups * c.dim * c.size * SEGMENT),
        dy(take(CHUNK * row + LANES)), scores(take(CHUNK * CHUNK)), passed(take(CHUNK * CHUNK)),
        mixed(take(CHUNK * CHUNK)), lost(take(CHUNK * CHUNK)), to_scores(take(CHUNK * CHUNK)), scaled(take(CHUNK * P)),
        u(take(CHUNK * wide)), v(take(CHUNK * N)), to_B(take(CHUNK * N)), to_C(take(CHUNK * N)), read(take(CHUNK)),
        found(take(CHUNK)), direct(take(CHUNK)), out(take(wide)), states(take(state_size * (SEGMENT - 1))),
        behind(take(state_size)) {}

  // All tokens of a document, for one group.
  void run(int64_t sequence, int64_t group) {
    const int64_t start = c.starts[sequence], chunks = (c.starts[sequence + 1] - start + CHUNK - 1) / CHUNK;
    const float* initial = c.state ? c.state + sequence * c.state_block + group * state_size : nullptr;
    any = false;
    for (int64_t segment = (chunks - 1) / SEGMENT; segment >= 0; --segment) {
      const int64_t begin = segment * SEGMENT, end = std::min(begin + SEGMENT, chunks);
      const float* before[SEGMENT] = {initial};
      if (segment) before[0] = c.kept + ((c.places[sequence] + segment - 1) * c.groups + group) * state_size;
      for (int64_t i = 0; i + 1 < end - begin; ++i) {
        Base::take_rows(start + (begin + i) * CHUNK, group, 0, CHUNK);
        Base::move(before[i], states + i * state_size);
        before[i + 1] = states + i * state_size;
      }
      for (int64_t chunk = end - 1; chunk >= begin; --chunk) {
        const int64_t token = start + chunk * CHUNK;
        go_back(token, std::min(CHUNK, c.starts[sequence + 1] - token), group, before[chunk - begin]);
      }
    }
    if (c.to_state) std::copy_n(behind, state_size, c.to_state + (sequence * c.groups + group) * state_size);
  }

 private:
  // The chunk of `count` rows from `token` on, with the state before it, or null. Moves `behind` in front of it.
  void go_back(int64_t token, int64_t count, int64_t group, const float* state) {
    Base::take_rows(token, group, 0, count);
    for (int64_t t = 0; t < count; ++t) Base::widen_heads(c.dy, token + t, group, dy + t * row);
    fill_up(count);
    products(B, N, CHUNK, C, N, CHUNK, N, scores, CHUNK);
    for (float* sums : {to_B, to_C}) std::fill(sums, sums + CHUNK * N, 0.0f);
    std::fill(to_scores, to_scores + CHUNK * CHUNK, 0.0f);
    for (int64_t h = 0; h < j; ++h)
      head(token, count, group, h, state ? state + h * P * N : nullptr, behind + h * P * N);
    any = true;
    combine(to_C, 1.0f, to_scores, 1, CHUNK, CHUNK, B, N, to_C, CHUNK);
    combine(to_B, 1.0f, to_scores, CHUNK, 1, CHUNK, C, N, to_B, CHUNK);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t place = ((token + t) * c.groups + group) * N;
      round_row(to_B + t * N, N, static_cast<T*>(c.to_B) + place);
      round_row(to_C + t * N, N, static_cast<T*>(c.to_C) + place);
    }
  }

  // Zeros behind the last row, and L as it was there.
  void fill_up(int64_t count) {
    for (float* rows : {x, dy}) std::fill(rows + count * row, rows + CHUNK * row, 0.0f);
    for (float* rows : {B, C}) std::fill(rows + count * N, rows + CHUNK * N, 0.0f);
    for (int64_t h = 0; h < j; ++h) {
      std::fill(dt + h * CHUNK + count, dt + (h + 1) * CHUNK, 0.0f);
      std::fill(L + h * CHUNK + count, L + (h + 1) * CHUNK, L[h * CHUNK + count - 1]);
    }
  }

  void head(int64_t token, int64_t count, int64_t group, int64_t h, const float* state, float* g) {
    const double* L = this->L + h * CHUNK;
    const float *dt = this->dt + h * CHUNK, *x = this->x + h * P, *dy = this->dy + h * P;
    const int64_t number = group * j + h;
    const float kept = Base::weigh(h);
    for (int64_t t = 0; t < CHUNK; ++t) {
      const float factor = decay(L[t]);
      for (int64_t p = 0; p < P; ++p) scaled[t * P + p] = factor * dy[t * row + p];
    }
    std::fill(read, read + CHUNK, 0.0f), std::fill(found, found + CHUNK, 0.0f), std::fill(u, u + CHUNK * wide, 0.0f);
    if (state) {
      combine(nullptr, 0.0f, scaled, P, 1, P, state, N, v, CHUNK);
      row_dots(v, N, C, N, N, read);
      for (int64_t i = 0; i < CHUNK * N; ++i) to_C[i] += v[i];
    }
    if (any) {
      products(B, N, CHUNK, g, N, P, N, u, wide);
      row_dots(x, row, u, wide, P, found);
      combine(to_B, 1.0f, weighted, P, 1, P, g, N, to_B, CHUNK);
    }
    products(x, row, CHUNK, dy, row, CHUNK, P, passed, CHUNK);
    between(L, dt, count);
    float* to_tokens = c.to_tokens + (token * c.heads + number) * 3;
    const float A = c.A[number], through = state && any ? kept * inner(state, g, P * N) : 0.0f;
    Vector prefix[2] = {};
    float later = through;
    for (int64_t r = 0; r < count; ++r, to_tokens += 3 * c.heads) {
      Vector sum = {};
      for (int64_t t = 0; t < CHUNK; t += LANES) {
        if (r) prefix[t / LANES] += load(lost + (r - 1) * CHUNK + t);
        sum += since(r, t) ? prefix[t / LANES] + load(read + t) : Vector{};
      }
      if (r) later += weights[r - 1] * found[r - 1];
      const float log = total(sum) + later, to_end = decay(L[CHUNK - 1] - L[r]);
      to_tokens[0] = std::fma(A, log, std::fma(to_end, found[r], direct[r]));
      to_tokens[1] = dt[r] * log;
      to_tokens[2] = passed[r * CHUNK + r];
    }
    for (int64_t s = 0; s < count; ++s) {
      mix(u + s * wide, weights[s], mixed + s * CHUNK, s, count, dy, row, c.D[number], dy + s * row, out, P);
      round_row(out, P, static_cast<T*>(c.out) + ((token + s) * c.heads + number) * P);
    }
    combine(any ? g : nullptr, kept, scaled, 1, P, CHUNK, C, N, g, P);
  }

  // Of the numbers t, t + 1, ..., those that are not below s.
  static Mask since(int64_t s, int64_t t) {
    constexpr Integers index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return index >= int32_t(s - t);
  }

  // What is between a row s and the rows t from it on; mixed, lost: [s, t].
  void between(const double* L, const float* dt, int64_t count) {
    for (int64_t s = 0; s < count; ++s) {
      Vector sum = {};
      for (int64_t t = s / LANES * LANES; t < CHUNK; t += LANES) {
        const int64_t i = s * CHUNK + t;
        const Mask later = since(s, t);
        const Vector e = later ? decays(load(L + t) - L[s]) : Vector{}, q = later ? load(passed + i) : Vector{};
        const Vector factor = (later ? load(scores + i) : Vector{}) * e, m = factor * dt[s];
        store(mixed + i, m);
        store(lost + i, m * q);
        store(to_scores + i, load(to_scores + i) + (e * dt[s]) * q);
        sum += factor * q;
      }
      direct[s] = total(sum);
    }
  }

  bool any;  // whether `behind` is not zero, or anything
  float *dy, *scores, *passed, *mixed, *lost, *to_scores, *scaled, *u, *v, *to_B, *to_C, *read, *found, *direct, *out;
  float *states, *behind;
};

}  // namespace

extern "C" void gradients(const Call* call) {
  call->bf16 ? run_all<Backward<uint16_t>>(*call) : run_all<Backward<float>>(*call);
}
