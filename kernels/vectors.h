// Sixteen fp32 lanes: arithmetic with the same bits on every CPU, and what bf16 needs.
//
// GCC's vector extensions split the lanes over the registers that there are. Every operation is one of IEEE 754, and a
// product and a sum are fused in fma alone; compile with -ffp-contract=off.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#ifdef __FMA__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LANES = 16;

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Eights __attribute__((vector_size(32)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

inline Vector load(const float* x) { return *reinterpret_cast<const Vector*>(x); }
inline void store(float* x, Vector v) { *reinterpret_cast<Vector*>(x) = v; }
inline Vector all(float x) { return x - Vector{}; }

inline Vector fma(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  Eights x[2], y[2], z[2];
  std::memcpy(x, &a, sizeof a), std::memcpy(y, &b, sizeof b), std::memcpy(z, &c, sizeof c);
  for (int i = 0; i < 2; ++i) z[i] = (Eights)_mm256_fmadd_ps((__m256)x[i], (__m256)y[i], (__m256)z[i]);
  std::memcpy(&c, z, sizeof c);
  return c;
#else
  for (int l = 0; l < LANES; ++l) c[l] = std::fma(a[l], b[l], c[l]);
  return c;
#endif
}

// exp(x) for x <= 0, within a unit in the last place: 2^n times the Taylor polynomial of degree 7 at x - n log 2; here
// n is x / log 2, rounded to even by adding 1.5 * 2^23. 0 below -87, where results would lose bits. NaN gives NaN.
inline Vector exponential(Vector x) {
  const Vector magic = all(12582912.0f);
  const Vector shifted = fma(x, all(1.44269504f), magic), n = shifted - magic;
  const Vector r = fma(n, all(2.12194440e-4f), fma(n, all(-0.693359375f), x));  // log 2 in two parts
  Vector y = all(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = fma(y, r, all(c));
  const Integers power = ((Integers)shifted - (Integers)magic + 127) << 23;
  return x < -87.0f ? Vector{} : y * (Vector)power;
}

// log(1 + exp(x)) within three units in the last place: max(x, 0) + log(1 + u) with u = exp(-|x|). With v = u / (2 + u)
// <= 1/3, log(1 + u) is 2 v times the series of v^2, of which nine terms count. NaN gives NaN.
inline Vector softplus(Vector x) {
  const Vector u = exponential((Vector)((Bits)x | 0x80000000u)), v = u / (2.0f + u), square = v * v;
  Vector y = all(1.0f / 17);
  for (int odd = 15; odd > 0; odd -= 2) y = fma(y, square, all(1.0f / odd));
  return (x > 0.0f ? x : Vector{}) + 2.0f * v * y;
}

inline Vector widen(const float* x) { return load(x); }
inline Vector widen(const uint16_t* x) {
  return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(x), Bits) << 16);
}
inline float widen_one(float x) { return x; }
inline float widen_one(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline void round_to(float x, float* y) { *y = x; }
inline void round_to(float x, uint16_t* y) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  *y = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// n <= 16 elements, zeros after them.
template <typename T>
inline Vector widen_some(const T* x, int64_t n) {
  if (n >= LANES) return widen(x);
  float y[LANES] = {};
  for (int64_t l = 0; l < n; ++l) y[l] = widen_one(x[l]);
  return load(y);
}

// Exchanges bit S of the number of a vector with the same bit of the number of a lane.
template <int S, int... L>
inline void exchange(Vector* x, std::integer_sequence<int, L...>) {
  for (int i = 0; i < LANES; ++i) {
    if (i & S) continue;
    const Vector a = x[i], b = x[i + S];
    x[i] = __builtin_shufflevector(a, b, (L & S ? int(LANES) + L - S : L)...);
    x[i + S] = __builtin_shufflevector(a, b, (L & S ? int(LANES) + L : L + S)...);
  }
}

// The sum of the lanes of each of 16 vectors, x destroyed: l and l + 8, then l and l + 4, l and l + 2, l and l + 1.
template <int S, int... L>
inline void halve(Vector* x, std::integer_sequence<int, L...>) {
  for (int i = 0; i < S; ++i) {
    const Vector a = x[i], b = x[i + S];
    x[i] = __builtin_shufflevector(a, b, (L & S ? int(LANES) + L - S : L)...) +
           __builtin_shufflevector(a, b, (L & S ? int(LANES) + L : L + S)...);
  }
}
inline Vector totals(Vector* x) {
  constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
  halve<8>(x, lanes), halve<4>(x, lanes), halve<2>(x, lanes), halve<1>(x, lanes);
  return x[0];
}

}  // namespace
