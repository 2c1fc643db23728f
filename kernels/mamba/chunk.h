// A chunk of the Mamba-2 scan: its rows as fp32, and the sums that forward and backward are made of.
//
// A sum has one of two orders, whatever it is cut from. Every operation rounds once, fp32:
//
//   dot products      the lanes' sum by halves (l and l + 8, l and l + 4, l and l + 2, l and l + 1), of 16 lanes
//                     ... fma(a_{l+32}, b_{l+32}, fma(a_{l+16}, b_{l+16}, fma(a_l, b_l, 0)))
//   sums of products  fma(a_k, b_k, ... fma(a_1, b_1, fma(a_0, b_0, first)))
//
// Rows are taken together only to load a number once for several of them. No sum is cut by calls, sequences, groups or
// threads. Head and state dimensions are multiples of 8.

#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "vectors.h"

namespace {

//: Tokens of a chunk; chunks between states that the forward pass leaves for the backward pass.
constexpr int64_t CHUNK = 32, SEGMENT = 8;
constexpr float FAINT = 0x1p-80f;

typedef double Doubles __attribute__((vector_size(8 * LANES), aligned(8), may_alias));

inline Doubles load(const double* x) { return *reinterpret_cast<const Doubles*>(x); }

// The numbers of a vector of which n are left, 8 or more; zeros behind them.
inline Vector load_some(const float* x, int64_t n) {
  if (n >= LANES) return load(x);
  Vector v = {};
  std::memcpy(&v, x, 4 * LANES / 2);
  return v;
}
inline void store_some(float* x, Vector v, int64_t n) {
  if (n >= LANES) return store(x, v);
  std::memcpy(x, &v, 4 * LANES / 2);
}

// exp(x rounded to fp32), or zero where that is not above FAINT: what it leaves is far below a rounding.
inline Vector decays(Doubles x) {
  const Vector e = exponential(__builtin_convertvector(x, Vector));
  return e <= FAINT ? Vector{} : e;
}
inline float decay(double x) { return decays(x - Doubles{})[0]; }

// Dot products of R rows with W rows, R W at most 16; that of r and w in lane r W + w.
template <int R, int W>
inline Vector dots(const float* a, int64_t a_row, const float* b, int64_t b_row, int64_t n) {
  Vector sums[LANES] = {};
  const auto add = [&](auto get, int64_t i) {
    Vector x[R];
    for (int r = 0; r < R; ++r) x[r] = get(a + r * a_row + i);
    for (int w = 0; w < W; ++w) {
      const Vector y = get(b + w * b_row + i);
      for (int r = 0; r < R; ++r) sums[r * W + w] = fma(x[r], y, sums[r * W + w]);
    }
  };
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) add([](const float* x) { return load(x); }, i);
  if (i < n) add([](const float* x) { return load_some(x, LANES / 2); }, i);
  return totals(sums);
}

// out[r, w] = a_r . b_w, for a multiple of 8 columns w.
inline void products(const float* a, int64_t a_row, int64_t rows, const float* b, int64_t b_row, int64_t columns,
                     int64_t n, float* out, int64_t out_row) {
  constexpr int R = 4, W = LANES / R;
  int64_t r = 0;
  for (; r + R <= rows; r += R)
    for (int64_t w = 0; w < columns; w += W) {
      const Vector found = dots<R, W>(a + r * a_row, a_row, b + w * b_row, b_row, n);
      for (int i = 0; i < R; ++i)
        std::memcpy(out + (r + i) * out_row + w, reinterpret_cast<const float*>(&found) + i * W, 4 * W);
    }
  for (; r < rows; ++r) {
    int64_t w = 0;
    for (; w + LANES <= columns; w += LANES)
      store(out + r * out_row + w, dots<1, LANES>(a + r * a_row, a_row, b + w * b_row, b_row, n));
    if (w < columns)
      store_some(out + r * out_row + w, dots<1, LANES / 2>(a + r * a_row, a_row, b + w * b_row, b_row, n), columns - w);
  }
}

// out_r = factor from_r + sum_k a_rk b_k, for four rows and W vectors of n columns; from may be null, for zero.
template <int W>
inline void combine_strip(const float* from, float factor, const float* a, int64_t a_r, int64_t a_k, int64_t count,
                          const float* b, int64_t n, float* out, int64_t left) {
  constexpr int R = 4;
  const auto get = [&](const float* x, int w) { return W > 1 ? load(x + w * LANES) : load_some(x, left); };
  Vector sum[R][W] = {};
  if (from)
    for (int r = 0; r < R; ++r)
      for (int w = 0; w < W; ++w) sum[r][w] = all(factor) * get(from + r * n, w);
  for (int64_t k = 0; k < count; ++k) {
    Vector x[W];
    for (int w = 0; w < W; ++w) x[w] = get(b + k * n, w);
    for (int r = 0; r < R; ++r)
      for (int w = 0; w < W; ++w) sum[r][w] = fma(all(a[r * a_r + k * a_k]), x[w], sum[r][w]);
  }
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) {
      if (W > 1) store(out + r * n + w * LANES, sum[r][w]);
      else store_some(out + r * n, sum[r][w], left);
    }
}

// The same for any multiple of 4 rows; from, b and out have rows of n numbers.
inline void combine(const float* from, float factor, const float* a, int64_t a_r, int64_t a_k, int64_t count,
                    const float* b, int64_t n, float* out, int64_t rows) {
  constexpr int W = 4;
  int64_t i = 0;
  const auto strips = [&](auto width) {
    for (int64_t r = 0; r < rows; r += 4)
      combine_strip<width>(from ? from + r * n + i : nullptr, factor, a + r * a_r, a_r, a_k, count, b + i, n,
                           out + r * n + i, n - i);
    i += width * LANES;
  };
  while (i + W * LANES <= n) strips(std::integral_constant<int, W>{});
  while (i < n) strips(std::integral_constant<int, 1>{});
}

// out = (first factor + sum_k m_k x_k) + D skip over k = begin ... end - 1, for P numbers. Whole vectors are loaded and
// stored, of which the last one may have 8 numbers of no meaning.
template <int W>
inline void mix_strip(const float* first, float factor, const float* m, int64_t begin, int64_t end, const float* x,
                      int64_t row, float D, const float* skip, float* out) {
  Vector sum[W];
  for (int w = 0; w < W; ++w) sum[w] = load(first + w * LANES) * all(factor);
  for (int64_t k = begin; k < end; ++k)
    for (int w = 0; w < W; ++w) sum[w] = fma(all(m[k]), load(x + k * row + w * LANES), sum[w]);
  for (int w = 0; w < W; ++w) store(out + w * LANES, fma(all(D), load(skip + w * LANES), sum[w]));
}

inline void mix(const float* first, float factor, const float* m, int64_t begin, int64_t end, const float* x,
                int64_t row, float D, const float* skip, float* out, int64_t P) {
  constexpr int W = 4;
  int64_t p = 0;
  for (; p + W * LANES <= P; p += W * LANES)
    mix_strip<W>(first + p, factor, m, begin, end, x + p, row, D, skip + p, out + p);
  for (; p < P; p += LANES) mix_strip<1>(first + p, factor, m, begin, end, x + p, row, D, skip + p, out + p);
}

// [tokens, heads or groups, ...] with the strides of its first two dimensions, and the rows of a cache's partial chunk,
// [CHUNK, heads or groups, ...], of which the next block's lie `block` elements behind.
struct Rows {
  const void* data;
  int64_t token, head;
  void* past;
  int64_t block;
};

struct Call {
  Rows x, dt, B, C, dy;
  const float *A, *D, *bias;
  float* state;  // [blocks, H, P, N] of a cache, or [sequences, H, P, N] before the documents, or null
  int64_t state_block;
  const int64_t *starts, *positions, *slots;  // of a sequence: its first row, the position of that, its block
  float* kept;                  // [places, H, P, N], states before every SEGMENT chunks but the first ones, or null
  const int64_t* places;        // of a sequence's first one
  void *out, *to_B, *to_C;      // y, or the gradients of x, B and C
  float *to_tokens, *to_state;  // gradients of dt, A and D [tokens, H, 3], and of the states before
  int64_t sequences, heads, groups, dim, size;
  double least, most;
  int64_t cached, bf16, threads;
};

// Elements of one row, a multiple of 8.
template <typename T>
inline void widen_row(const T* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += LANES) {
    if (n - i >= LANES) store(out + i, widen(x + i));
    else for (int l = 0; l < LANES / 2; ++l) out[i + l] = widen_one(x[i + l]);
  }
}
template <typename T>
inline void round_row(const float* x, int64_t n, T* out) {
  for (int64_t i = 0; i < n; ++i) round_to(x[i], out + i);
}

// The rows of a chunk of one group of j heads, in memory that a thread keeps from call to call.
template <typename T>
class Chunk {
 protected:
  // `more`: fp32 numbers that a subclass takes.
  Chunk(const Call& c, int64_t more)
      : c(c), j(c.heads / c.groups), P(c.dim), N(c.size), row(j * P), wide(P + LANES), state_size(row * N) {
    static thread_local std::vector<float> floats;
    static thread_local std::vector<double> doubles;
    const size_t size = CHUNK * (row + 2 * N + j + P + 1) + LANES + more;
    if (floats.size() < size) floats.resize(size);
    if (doubles.size() < size_t(j * CHUNK)) doubles.resize(j * CHUNK);
    next = floats.data(), L = doubles.data();
    x = take(CHUNK * row + LANES), B = take(CHUNK * N), C = take(CHUNK * N), dt = take(CHUNK * j);
    weighted = take(CHUNK * P), weights = take(CHUNK);
  }

  float* take(int64_t n) { return std::exchange(next, next + n); }

  const T* at(const Rows& rows, int64_t token, int64_t head) const {
    return static_cast<const T*>(rows.data) + token * rows.token + head * rows.head;
  }

  void widen_heads(const Rows& rows, int64_t token, int64_t group, float* out) const {
    for (int64_t h = 0; h < j; ++h) widen_row(at(rows, token, group * j + h), P, out + h * P);
  }

  // Rows first ... count - 1, which begin at `token`; those before are there.
  void take_rows(int64_t token, int64_t group, int64_t first, int64_t count) {
    for (int64_t t = first; t < count; ++t, ++token) {
      widen_heads(c.x, token, group, x + t * row);
      widen_row(at(c.B, token, group), N, B + t * N);
      widen_row(at(c.C, token, group), N, C + t * N);
      const T* raw = at(c.dt, token, group * j);
      for (int64_t h = 0; h < j; h += LANES) {
        Vector v = softplus(widen_some(raw + h, j - h) + widen_some(c.bias + group * j + h, j - h));
        v = v < float(c.least) ? all(c.least) : v;
        v = v > float(c.most) ? all(c.most) : v;
        for (int64_t l = 0; l < std::min(LANES, j - h); ++l) dt[(h + l) * CHUNK + t] = v[l];
      }
    }
    for (int64_t h = 0; h < j; ++h) {
      double sum = 0;
      for (int64_t t = 0; t < count; ++t) L[h * CHUNK + t] = sum += double(c.A[group * j + h]) * dt[h * CHUNK + t];
    }
  }

  // w_s, and w_s x_s, of head h. Returns the factor of the state.
  float weigh(int64_t h) {
    const double* L = this->L + h * CHUNK;
    for (int64_t s = 0; s < CHUNK; s += LANES)
      store(weights + s, decays(L[CHUNK - 1] - load(L + s)) * load(dt + h * CHUNK + s));
    for (int64_t s = 0; s < CHUNK; ++s)
      for (int64_t p = 0; p < P; ++p) weighted[s * P + p] = weights[s] * x[s * row + h * P + p];
    return decay(L[CHUNK - 1]);
  }

  // The state behind a whole chunk, from the one before or null, for all heads.
  void move(const float* before, float* after) {
    for (int64_t h = 0; h < j; ++h) {
      const float kept = weigh(h);
      combine(before ? before + h * P * N : nullptr, kept, weighted, 1, P, CHUNK, B, N, after + h * P * N, P);
    }
  }

  const Call& c;
  const int64_t j, P, N, row, wide, state_size;
  float *x, *B, *C;                // [CHUNK, j P] and [CHUNK, N]
  float *dt, *weighted, *weights;  // [j, CHUNK], [CHUNK, P] and [CHUNK]
  double* L;                       // [j, CHUNK]

 private:
  float* next;
};

// Runs a worker for every sequence and group.
template <typename Worker>
void run_all(const Call& c) {
  std::atomic<int64_t> next{0};
  const int64_t items = c.sequences * c.groups;
  const auto work = [&] {
    Worker worker(c);
    for (int64_t i; (i = next++) < items;) worker.run(i / c.groups, i % c.groups);
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < std::min(c.threads, items); ++i) others.emplace_back(work);
  work();
  for (auto& thread : others) thread.join();
}

}  // namespace
