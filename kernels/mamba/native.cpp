// The selective scan of Mamba-2 by chunks of 32 tokens, which begin at position 0 of a sequence: packed documents, new
// tokens of sequences with a cache, and one token of each are the same code.
//
// The arithmetic of row t of a chunk and of one head, with h [P, N] the state before the chunk; L is float64, all else
// fp32, and every operation rounds once. Dot products have the order of chunk.h:
//
//   dt_t = softplus(raw_t + bias) within the limits; softplus and exp are those of vectors.h
//   L_t  = L_{t-1} + A dt_t, from zero
//   e(v) = exp(v rounded to fp32), or zero where that is not above 2^-80
//   m_s  = ((C_t . B_s) e(L_t - L_s)) dt_s, for s <= t
//   y_p  = fma(D, x_tp, fma(m_t, x_tp, ... fma(m_1, x_1p, fma(m_0, x_0p, (C_t . h_p) e(L_t)))))
//
// y is then rounded to the dtype of x. Only a chunk with all its rows moves the state; its last row is z:
//
//   w_s   = e(L_z - L_s) dt_s
//   h'_pn = fma(w_z x_zp, B_zn, ... fma(w_0 x_0p, B_0n, e(L_z) h_pn))
//
// Of rows behind t nothing is used, and of a cache only what belongs to the sequence. So a token has the same bits in
// every company, with every cut of its sequence into calls and with every vector instruction set.

#include "chunk.h"

namespace {

template <typename T>
class Forward : Chunk<T> {
  using Base = Chunk<T>;
  using Base::B, Base::C, Base::L, Base::N, Base::P, Base::c, Base::dt, Base::j, Base::row, Base::state_size,
      Base::take, Base::wide, Base::x;

 public:
  explicit Forward(const Call& c)
      : Base(c, CHUNK * (CHUNK + 1) + (CHUNK + 1) * (c.dim + LANES) + c.heads / c.groups * c.dim * c.size),
        scores(take(CHUNK * CHUNK)), m(take(CHUNK)), read(take(CHUNK * wide)), y(take(wide)), own(take(state_size)) {}

  // All new tokens of a sequence, for one group.
  void run(int64_t sequence, int64_t group) {
    const int64_t slot = c.slots ? c.slots[sequence] : sequence, position = c.positions ? c.positions[sequence] : 0;
    float* state = c.state ? c.state + slot * c.state_block + group * state_size : nullptr;
    float* after = c.cached ? state : own;
    const float* before = c.cached && position < CHUNK ? nullptr : state;
    int64_t token = c.starts[sequence], first = position % CHUNK;
    const int64_t end = c.starts[sequence + 1];
    recall(slot, group, first);
    for (int64_t chunk = 0; token < end; ++chunk, first = 0) {
      const int64_t count = std::min(CHUNK, first + end - token);
      Base::take_rows(token, group, first, count);
      if (c.kept && chunk && chunk % SEGMENT == 0) {
        const int64_t place = c.places[sequence] + chunk / SEGMENT - 1;
        std::copy(before, before + state_size, c.kept + (place * c.groups + group) * state_size);
      }
      products(C + first * N, N, count - first, B, N, CHUNK, N, scores + first * CHUNK, CHUNK);
      for (int64_t h = 0; h < j; ++h)
        outputs(token - first, group, h, first, count, before ? before + h * P * N : nullptr);
      if (count == CHUNK) Base::move(before, after), before = after;
      else if (c.cached) keep(slot, token, group, first, count);
      token += count - first;
    }
  }

 private:
  // Rows 0 ... count - 1 of a chunk, from the cache.
  void recall(int64_t slot, int64_t group, int64_t count) {
    for (int64_t t = 0; t < count; ++t) {
      const int64_t place = t * c.groups + group;
      widen_row(past<T>(c.x, slot) + place * row, row, x + t * row);
      widen_row(past<T>(c.B, slot) + place * N, N, B + t * N);
      for (int64_t h = 0; h < j; ++h) dt[h * CHUNK + t] = past<float>(c.dt, slot)[place * j + h];
    }
  }

  // Leaves the new rows of a chunk that is not whole in the cache.
  void keep(int64_t slot, int64_t token, int64_t group, int64_t first, int64_t count) {
    for (int64_t t = first; t < count; ++t, ++token) {
      const int64_t place = t * c.groups + group;
      for (int64_t h = 0; h < j; ++h) {
        std::copy_n(Base::at(c.x, token, group * j + h), P, past<T>(c.x, slot) + place * row + h * P);
        past<float>(c.dt, slot)[place * j + h] = dt[h * CHUNK + t];
      }
      std::copy_n(Base::at(c.B, token, group), N, past<T>(c.B, slot) + place * N);
    }
  }

  template <typename U>
  static U* past(const Rows& rows, int64_t slot) { return static_cast<U*>(rows.past) + slot * rows.block; }

  // y of rows first ... count - 1 of head h; row t is token origin + t.
  void outputs(int64_t origin, int64_t group, int64_t h, int64_t first, int64_t count, const float* state) {
    const double* L = this->L + h * CHUNK;
    const int64_t head = group * j + h;
    if (state) products(C + first * N, N, count - first, state, N, P, N, read + first * wide, wide);
    else std::fill(read + first * wide, read + count * wide, 0.0f);
    for (int64_t t = first; t < count; ++t) {
      for (int64_t s = 0; s <= t; s += LANES)
        store(m + s, load(scores + t * CHUNK + s) * decays(L[t] - load(L + s)) * load(dt + h * CHUNK + s));
      const float* rows = x + h * P;
      mix(read + t * wide, decay(L[t]), m, 0, t + 1, rows, row, c.D[head], rows + t * row, y, P);
      round_row(y, P, static_cast<T*>(c.out) + ((origin + t) * c.heads + head) * P);
    }
  }

  float *scores, *m;       // [CHUNK, CHUNK], by t and s, and [CHUNK]
  float *read, *y, *own;   // [CHUNK, wide], [wide], [j, P, N]
};

}  // namespace

extern "C" void scan(const Call* call) {
  call->bf16 ? run_all<Forward<uint16_t>>(*call) : run_all<Forward<float>>(*call);
}
