// Causal attention of query rows over keys and values that lie in blocks of 128: the pages of a cache, or a document.
//
// The arithmetic of one row, with keys 0 ... n - 1 of D elements, all in fp32, each line a rounding of its own:
//
//   a_d = q_d * scale
//   s_k = fma(a_{D-1}, k_{D-1}, ... fma(a_1, k_1, fma(a_0, k_0, 0)))        from dimension 0 upwards
//   m   = max_k s_k
//   p_k = exp(s_k - m), the function of vectors.h
//   t_l = p_l + p_{l+16} + p_{l+32} + ..., for 16 lanes, from the left; t = the sum of the lanes by halves: l and
//         l + 8, l and l + 4, l and l + 2, l and l + 1
//   o_d = fma(p_{n-1}, v_{n-1,d}, ... fma(p_1, v_{1,d}, fma(p_0, v_{0,d}, 0)))  from key 0 upwards
//   result_d = o_d / t, rounded to the dtype of q
//
// Rows are taken together only to load a key or a value once for several of them. No sum runs over rows and none is cut
// by blocks, strips or threads, so a row has the same bits in every company, and with every vector instruction set. Of
// keys that a row does not see nothing is used.

#include <atomic>
#include <limits>
#include <thread>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t KEYS = 128;
//: Rows that are computed together, and fp32 scores that they may have; neither changes a bit.
constexpr int64_t ROWS = 64, SCORES = 1 << 18;
//: Keys between a load and what is fetched from memory in the meantime.
constexpr int64_t AHEAD = 16;

// Keys [count, dim] -> fp32 [dim, KEYS]; zeros up to a multiple of 64 keys.
template <typename T>
void transpose(const T* keys, int64_t row, int64_t count, int64_t dim, float* out) {
  constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
  for (int64_t first = 0; first < count; first += 4 * LANES)
    for (int64_t k = first; k < first + 4 * LANES; k += LANES)
      for (int64_t d = 0; d < dim; d += LANES) {
        Vector x[LANES];
        for (int i = 0; i < LANES; ++i) {
          x[i] = k + i < count ? widen_some(keys + (k + i) * row + d, dim - d) : Vector{};
          __builtin_prefetch(keys + (k + i + AHEAD) * row + d);
        }
        exchange<8>(x, lanes), exchange<4>(x, lanes), exchange<2>(x, lanes), exchange<1>(x, lanes);
        for (int i = 0; i < std::min(LANES, dim - d); ++i) store(out + (d + i) * KEYS + k, x[i]);
      }
}

// Scores of R rows with `count` keys, in strips of W vectors. q: [dim, R]; out: [R, width].
template <int R, int W>
void scores(const float* q, const float* keys, int64_t count, int64_t dim, float* out, int64_t width) {
  for (int64_t k = 0; k < count; k += W * LANES) {
    Vector sum[R][W] = {};
    for (int64_t d = 0; d < dim; ++d) {
      Vector key[W];
      for (int w = 0; w < W; ++w) key[w] = load(keys + d * KEYS + k + w * LANES);
      for (int r = 0; r < R; ++r)
        for (int w = 0; w < W; ++w) sum[r][w] = fma(all(q[d * R + r]), key[w], sum[r][w]);
    }
    for (int r = 0; r < R; ++r)
      for (int w = 0; w < W; ++w) store(out + r * width + k + w * LANES, sum[r][w]);
  }
}

// Scores -> exponentials, in place. Returns their sum.
float exponentials(float* s, int64_t count) {
  constexpr float lowest = -std::numeric_limits<float>::infinity();
  for (int64_t k = count; k % LANES; ++k) s[k] = lowest;
  Vector most = all(lowest), sum = {};
  for (int64_t k = 0; k < count; k += LANES) most = load(s + k) > most ? load(s + k) : most;
  float m = most[0];
  for (int l = 1; l < LANES; ++l) m = most[l] > m ? most[l] : m;
  for (int64_t k = 0; k < count; k += LANES) {
    const Vector p = exponential(load(s + k) - m);
    store(s + k, p);
    sum += p;
  }
  for (int half = LANES / 2; half; half /= 2)
    for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
  return sum[0];
}

// Adds `count` values of W vectors to R rows. p: [R, width]; out: [R, padded].
template <int R, int W>
inline void values_strip(const float* p, int64_t width, const float* v, int64_t row, int64_t count, float* out,
                         int64_t padded) {
  Vector sum[R][W];
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) sum[r][w] = load(out + r * padded + w * LANES);
  for (int64_t k = 0; k < count; ++k) {
    Vector value[W];
    for (int w = 0; w < W; ++w) {
      value[w] = load(v + k * row + w * LANES);
      if (R < 8) __builtin_prefetch(v + (k + AHEAD) * row + w * LANES);
    }
    for (int r = 0; r < R; ++r)
      for (int w = 0; w < W; ++w) sum[r][w] = fma(all(p[r * width + k]), value[w], sum[r][w]);
  }
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < W; ++w) store(out + r * padded + w * LANES, sum[r][w]);
}

template <int R>
void values(const float* p, int64_t width, const float* v, int64_t row, int64_t count, float* out, int64_t padded) {
  constexpr int W = R > 4 ? 2 : 4;
  int64_t d = 0;
  for (; d + W * LANES <= padded; d += W * LANES) values_strip<R, W>(p, width, v + d, row, count, out + d, padded);
  for (; d + 2 * LANES <= padded; d += 2 * LANES) values_strip<R, 2>(p, width, v + d, row, count, out + d, padded);
  for (; d < padded; d += LANES) values_strip<R, 1>(p, width, v + d, row, count, out + d, padded);
}

struct Call {
  const void *q, *keys, *values;
  void* out;
  int64_t q_token, q_head;        // strides of q [tokens, heads, dim], in elements
  int64_t block, head, row;       // strides of a block of keys or values, of a KV head, and of a key in its block
  const int64_t *table, *starts, *lengths;
  int64_t table_row, sequences, heads, kv_heads, dim;
  double scale;
  int64_t bf16, threads;
};

// Queries first ... first + queries - 1 of a sequence, with the heads that one KV head serves.
struct Item {
  int64_t sequence, first, queries, kv_head;
};

template <typename T>
class Worker {
 public:
  explicit Worker(const Call& c) : c(c), group(c.heads / c.kv_heads), padded((c.dim + LANES - 1) / LANES * LANES) {}

  void run(const Item& item) {
    const int64_t start = c.starts[item.sequence], tokens = c.starts[item.sequence + 1] - start;
    const int64_t before = c.lengths[item.sequence] - tokens + item.first;  // position of the first query
    const int64_t rows = item.queries * group, last = before + item.queries, blocks = (last + KEYS - 1) / KEYS;
    width = blocks * KEYS;
    static thread_local std::vector<float> memory;
    memory.resize(std::max<int64_t>(memory.size(), rows * (c.dim + padded + width + 1) + KEYS * padded));
    float *q = memory.data(), *out = q + rows * c.dim, *s = out + rows * padded, *block = s + rows * width;
    float* sums = block + KEYS * padded;
    const int64_t* table = c.table + item.sequence * c.table_row;

    const auto token = [&](int64_t row) { return start + item.first + row / group; };
    const auto head = [&](int64_t row) { return item.kv_head * group + row % group; };
    const auto end = [&](int64_t row) { return before + row / group + 1; };  // keys that a row sees

    each(rows, [&](auto R, int64_t row) {
      for (int r = 0; r < R; ++r) {
        const T* x = static_cast<const T*>(c.q) + token(row + r) * c.q_token + head(row + r) * c.q_head;
        for (int64_t d = 0; d < c.dim; ++d) q[row * c.dim + d * R + r] = widen_one(x[d]) * float(c.scale);
      }
    });
    for (int64_t j = 0; j < blocks; ++j) {
      const T* keys = static_cast<const T*>(c.keys) + table[j] * c.block + item.kv_head * c.head;
      transpose(keys, c.row, std::min(KEYS, last - j * KEYS), c.dim, block);
      each(rows, [&](auto R, int64_t row) {
        const int64_t count = std::min(KEYS, end(row + R - 1) - j * KEYS);
        scores<R, R == 8 ? 2 : 4>(q + row * c.dim, block, count, c.dim, s + row * width + j * KEYS, width);
      });
    }
    for (int64_t row = 0; row < rows; ++row) sums[row] = exponentials(s + row * width, end(row));
    std::fill(out, out + rows * padded, 0.0f);
    for (int64_t j = 0; j < blocks; ++j) {
      const T* first = static_cast<const T*>(c.values) + table[j] * c.block + item.kv_head * c.head;
      int64_t stride;
      const float* v = widened(first, std::min(KEYS, last - j * KEYS), block, &stride);
      each(rows, [&](auto R, int64_t row) {
        // What all rows see, then for each row what only it sees of its own.
        const int64_t common = std::clamp<int64_t>(end(row) - j * KEYS, 0, KEYS);
        values<R>(s + row * width + j * KEYS, width, v, stride, common, out + row * padded, padded);
        for (int64_t r = row; r < row + R; ++r) {
          const int64_t more = std::min(KEYS, end(r) - j * KEYS) - common;
          if (more > 0)
            values<1>(s + r * width + j * KEYS + common, width, v + common * stride, stride, more, out + r * padded,
                      padded);
        }
      });
    }
    for (int64_t row = 0; row < rows; ++row) {
      T* y = static_cast<T*>(c.out) + (token(row) * c.heads + head(row)) * c.dim;
      for (int64_t d = 0; d < c.dim; ++d) round_to(out[row * padded + d] / sums[row], y + d);
    }
  }

 private:
  // Calls f(R, row) for 8, 4, 2 or 1 rows, R being a constant, until all rows have been taken.
  template <typename F>
  static void each(int64_t rows, F f) {
    int64_t row = 0;
    for (; row + 8 <= rows; row += 8) f(std::integral_constant<int, 8>{}, row);
    if (rows & 4) f(std::integral_constant<int, 4>{}, row), row += 4;
    if (rows & 2) f(std::integral_constant<int, 2>{}, row), row += 2;
    if (rows & 1) f(std::integral_constant<int, 1>{}, row);
  }

  // fp32 values with rows of whole vectors, zeros at their end; in place where they are that already.
  const float* widened(const T* v, int64_t count, float* out, int64_t* stride) const {
    if constexpr (std::is_same_v<T, float>) {
      *stride = c.row;
      if (c.dim == padded) return v;
    }
    *stride = padded;
    for (int64_t k = 0; k < count; ++k)
      for (int64_t d = 0; d < padded; d += LANES) store(out + k * padded + d, widen_some(v + k * c.row + d, c.dim - d));
    return out;
  }

  const Call& c;
  const int64_t group, padded;
  int64_t width = 0;
};

template <typename T>
void attend_all(const Call& c) {
  std::vector<Item> items;
  const int64_t group = c.heads / c.kv_heads;
  for (int64_t i = 0; i < c.sequences; ++i) {
    const int64_t tokens = c.starts[i + 1] - c.starts[i];
    const int64_t rows = std::clamp(SCORES / std::max<int64_t>(c.lengths[i], 1), int64_t(8), ROWS);
    const int64_t queries = std::max<int64_t>(rows / group, 1);
    for (int64_t first = 0; first < tokens; first += queries)
      for (int64_t h = 0; h < c.kv_heads; ++h) items.push_back({i, first, std::min(queries, tokens - first), h});
  }
  std::atomic<size_t> next{0};
  const auto work = [&] {
    Worker<T> worker(c);
    for (size_t i; (i = next++) < items.size();) worker.run(items[i]);
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < std::min<int64_t>(c.threads, items.size()); ++i) others.emplace_back(work);
  work();
  for (auto& thread : others) thread.join();
}

}  // namespace

extern "C" void attend(const Call* call) { call->bf16 ? attend_all<uint16_t>(*call) : attend_all<float>(*call); }

// Copies rows of `bytes` bytes: new keys and values of each token and KV head to their places in the pages, which have
// the layout [blocks, kv_heads, 2, KEYS]. Tokens with a negative slot (block * KEYS + place) are passed over.
extern "C" void store_pages(const char* keys, const char* values, char* pages, const int64_t* slots, int64_t tokens,
                            int64_t kv_heads, int64_t bytes, int64_t k_token, int64_t k_head, int64_t v_token,
                            int64_t v_head) {
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0) continue;
    for (int64_t h = 0; h < kv_heads; ++h) {
      char* page = pages + ((slots[t] / KEYS * kv_heads + h) * 2 * KEYS + slots[t] % KEYS) * bytes;
      std::memcpy(page, keys + t * k_token + h * k_head, bytes);
      std::memcpy(page + KEYS * bytes, values + t * v_token + h * v_head, bytes);
    }
  }
}
