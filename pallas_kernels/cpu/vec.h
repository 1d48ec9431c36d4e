// Vectors of float32 on GCC's vector extensions: AVX-512, AVX2, NEON or plain 128-bit lanes.
// Nothing here knows an op. Included by the kernels.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VEC_BYTES 64
constexpr int kTileM = 8, kTileV = 3;  // 24 of 32 registers hold sums
constexpr int kDots = 16;              // the same for sums along a vector; a multiple of lanes
#elif defined(__AVX__)
#define VEC_BYTES 32
constexpr int kTileM = 6, kTileV = 2;  // 12 of 16
constexpr int kDots = 8;
#elif defined(__aarch64__)
#define VEC_BYTES 16
constexpr int kTileM = 6, kTileV = 4;  // 24 of 32
constexpr int kDots = 16;
#else
#define VEC_BYTES 16
constexpr int kTileM = 4, kTileV = 2;
constexpr int kDots = 8;
#endif

typedef float vf __attribute__((vector_size(VEC_BYTES)));
typedef int32_t vi __attribute__((vector_size(VEC_BYTES)));
typedef float vf_any __attribute__((vector_size(VEC_BYTES), aligned(4), may_alias));

constexpr int64_t kLanes = VEC_BYTES / 4;
constexpr int64_t kTileN = kTileV * kLanes;

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif
#define INLINE inline __attribute__((always_inline))

INLINE vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
INLINE void store(float* p, vf v) { *reinterpret_cast<vf_any*>(p) = v; }
// a * b + c. By name, and with the compiler's own contraction off: compilers fuse in one tile shape and not
// in another, and then a row's result would depend on the batch.
INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__) && defined(__AVX__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}
INLINE vf max(vf a, vf b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <int... I>
struct Seq {};
template <int N, int... I>
struct MakeSeq : MakeSeq<N - 1, N - 1, I...> {};
template <int... I>
struct MakeSeq<0, I...> {
  using type = Seq<I...>;
};
using Lanes = MakeSeq<kLanes>::type;

// Not vf{} + x: that addition is kept (it turns -0 into 0) and costs a step in every inner loop.
template <int... I>
INLINE vf splat(float x, Seq<I...>) {
  return vf{(static_cast<void>(I), x)...};
}
INLINE vf splat(float x) { return splat(x, Lanes{}); }

template <int... I>
INLINE vf zip_low(vf a, vf b, Seq<I...>) {
  return SHUFFLE(a, b, (I / 2 + (I % 2) * int(kLanes))...);
}
template <int... I>
INLINE vf zip_high(vf a, vf b, Seq<I...>) {
  return SHUFFLE(a, b, (int(kLanes) / 2 + I / 2 + (I % 2) * int(kLanes))...);
}

// r[i][j] becomes r[j][i]: log2(lanes) perfect shuffles.
INLINE void transpose(vf r[kLanes]) {
  for (int64_t s = 1; s < kLanes; s *= 2) {
    vf t[kLanes];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes / 2; ++i) {
      t[2 * i] = zip_low(r[i], r[i + kLanes / 2], Lanes{});
      t[2 * i + 1] = zip_high(r[i], r[i + kLanes / 2], Lanes{});
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) r[i] = t[i];
  }
}

// out[i] is the sum of r[i]; every sum is the same tree, wherever its vector stands.
INLINE vf sums(vf r[kLanes]) {
#pragma GCC unroll 4
  for (int64_t half = kLanes / 2; half; half /= 2)
#pragma GCC unroll 16
    for (int64_t i = 0; i < half; ++i)
      r[i] = zip_low(r[i], r[i + half], Lanes{}) + zip_high(r[i], r[i + half], Lanes{});
  return r[0];
}

template <int... I>
INLINE vi lane_numbers(Seq<I...>) {
  return vi{I...};
}
template <int S, int... I>
INLINE vf turned(vf v, Seq<I...>) {
  return SHUFFLE(v, v, ((I + S) % int(kLanes))...);
}
// The sum, or the maximum, of all lanes, by a fixed tree.
template <int S = kLanes / 2>
INLINE float sum_of(vf v) {
  if constexpr (S == 0) return v[0];
  else return sum_of<S / 2>(v + turned<S>(v, Lanes{}));
}
template <int S = kLanes / 2>
INLINE float max_of(vf v) {
  if constexpr (S == 0) return v[0];
  else return max_of<S / 2>(max(v, turned<S>(v, Lanes{})));
}

// Scratch that a thread keeps between calls, `floats` long and aligned to a vector.
INLINE float* scratch(int64_t floats) {
  struct Block {
    float* data = nullptr;
    int64_t size = 0;
    ~Block() { std::free(data); }
  };
  static thread_local Block block;
  if (block.size < floats) {
    std::free(block.data);
    block.size = round_up(floats, 1024);
    block.data = static_cast<float*>(std::aligned_alloc(64, block.size * sizeof(float)));
  }
  return block.data;
}
