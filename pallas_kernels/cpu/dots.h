// x[M, K] @ w[N, K].T: dot products along the rows that are stored, for tied heads.
// Lane l of a vector sums k = l, l + lanes, ...; then one fixed tree adds the lanes. The order is the same
// whatever M is and whichever tile holds the element: a row's result never depends on the batch.
#pragma once

#include "matmul.h"

struct Dots {
  const float* x;
  const float* w;
  float* out;
  int64_t m, k, n;

  // out[i.. + MR, j.. + NR]; fetches FETCH rows of the next block, from row `ahead` on, meanwhile.
  template <int MR, int NR, int FETCH>
  void tile(int64_t i, int64_t j, int64_t ahead) const {
    vf sum[MR * NR];
#pragma GCC unroll 32
    for (int s = 0; s < MR * NR; ++s) sum[s] = vf{};
    auto step = [&](auto&& read, int64_t at) __attribute__((always_inline)) {
      vf a[MR];
#pragma GCC unroll 32
      for (int r = 0; r < MR; ++r) a[r] = read(x + (i + r) * k + at);
#pragma GCC unroll 32
      for (int v = 0; v < NR; ++v) {
        vf b = read(w + (j + v) * k + at);
#pragma GCC unroll 32
        for (int r = 0; r < MR; ++r) sum[r * NR + v] = fma(a[r], b, sum[r * NR + v]);
      }
    };
    int64_t at = 0, whole = k / kLanes * kLanes;
    for (; at < whole; at += kLanes) {
#pragma GCC unroll 32
      for (int v = 0; v < FETCH; ++v) __builtin_prefetch(w + (ahead + v) * k + at, 0, 2);
      step([](const float* p) __attribute__((always_inline)) { return load(p); }, at);
    }
    if (at < k) {
      step(
          [&](const float* p) __attribute__((always_inline)) {
            float padded[kLanes] = {};
            std::memcpy(padded, p, (k - whole) * sizeof(float));
            return load(padded);
          },
          at);
    }
#pragma GCC unroll 8
    for (int s = 0; s < MR * NR; s += kLanes) {
      vf total = sums(sum + s);
      for (int l = 0; l < kLanes; ++l) out[(i + (s + l) / NR) * n + j + (s + l) % NR] = total[l];
    }
  }

  // Rows i.. + MR of x times the kDots rows of w from j on.
  // Of `turns` such calls the first ones fetch the next block, each its part.
  template <int MR, int TURNS>
  void block(int64_t i, int64_t j, int64_t turn) const {
    constexpr int NR = kDots / MR, fetch = NR / TURNS;
    for (int s = 0; s < MR; ++s) {
      int64_t at = j + s * NR, ahead = at + kDots + turn * fetch;
      turn < TURNS ? tile<MR, NR, fetch>(i, at, ahead) : tile<MR, NR, 0>(i, at, 0);
    }
  }

  template <int TURNS>
  void rows(int64_t j) const {
    int64_t turn = 0, i = 0;
    for (; i + 4 <= m; i += 4) block<4, TURNS>(i, j, turn++);
    if (i + 2 <= m) block<2, TURNS>(i, j, turn++), i += 2;
    if (i < m) block<1, TURNS>(i, j, turn);
  }
  void rows(int64_t j) const { m <= 4 ? rows<1>(j) : rows<2>(j); }

  // The last rows of w, fewer than kDots: a padded copy of them gives the same sums.
  void ragged(int64_t j, int64_t count) const {
    float *rest = scratch(kDots * k + m * kDots), *part = rest + kDots * k;
    std::fill(rest, rest + kDots * k, 0.0f);
    std::memcpy(rest, w + j * k, count * k * sizeof(float));
    Dots{x, rest, part, m, k, kDots}.rows(0);
    for (int64_t i = 0; i < m; ++i)
      std::memcpy(out + i * n + j, part + i * kDots, count * sizeof(float));
  }

  void run(ffi::ThreadPool& pool) const {
    int64_t blocks = (n + kDots - 1) / kDots;
    int64_t tasks = std::min(blocks, tasks_for(pool, k * n, kTaskWork));
    parallel(pool, tasks, [&](int64_t t) {
      for (int64_t b = blocks * t / tasks; b < blocks * (t + 1) / tasks; ++b) {
        int64_t j = b * kDots;
        j + kDots <= n ? rows(j) : ragged(j, n - j);
      }
    });
  }
};
