// x[M, K] @ w[K, N], with w read where it is stored, once from memory.
// Every output element is one chain of fused multiply-adds over k = 0, 1, ..., K - 1, whatever M is and
// whichever tile holds it: a row's result is bitwise the same alone, batched or chunked.
#pragma once

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "vec.h"

constexpr int kSums = kTileM * kTileV;  // registers that hold sums
constexpr int64_t kBlockK = 128;        // depth of a packed panel
constexpr int kStreamed = 3;            // up to so many rows of x, weights are read in storage order
constexpr int64_t kTaskWork = 1 << 18;  // least weights of a task

// Vectors that a tile of `rows` rows is wide.
constexpr int width_for(int rows) { return rows <= kStreamed ? kTileV : kSums / rows; }

// One row's part of a panel to fetch early: every `every` steps one row of NV vectors.
struct Ahead {
  const float* row;
  int64_t stride, every;
};

// c[MR, NV vectors] (+)= x[MR, depth] @ w[depth, NV vectors], fetching `ahead` meanwhile.
template <int MR, int NV>
void tile(int64_t depth, const float* x, int64_t ldx, const float* w, int64_t ldw, float* c,
          int64_t ldc, bool first, Ahead ahead) {
  vf sum[MR][NV];
#pragma GCC unroll 24
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 24
    for (int v = 0; v < NV; ++v) sum[m][v] = first ? vf{} : load(c + m * ldc + v * kLanes);
  auto step = [&](int64_t k) __attribute__((always_inline)) {
    vf b[NV];
#pragma GCC unroll 24
    for (int v = 0; v < NV; ++v) b[v] = load(w + k * ldw + v * kLanes);
#pragma GCC unroll 24
    for (int m = 0; m < MR; ++m) {
      vf a = splat(x[m * ldx + k]);
#pragma GCC unroll 24
      for (int v = 0; v < NV; ++v) sum[m][v] = fma(a, b[v], sum[m][v]);
    }
  };
  int64_t k = 0;
  if (ahead.row) {
    for (; k < depth; ahead.row += ahead.stride) {
#pragma GCC unroll 24
      for (int v = 0; v < NV; ++v) __builtin_prefetch(ahead.row + v * kLanes, 0, 2);
      for (int64_t end = std::min(depth, k + ahead.every); k < end; ++k) step(k);
    }
  } else {
    for (; k < depth; ++k) step(k);
  }
#pragma GCC unroll 24
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 24
    for (int v = 0; v < NV; ++v) store(c + m * ldc + v * kLanes, sum[m][v]);
}

// The same for R rows of w, unrolled, with the R rows below them fetched meanwhile.
template <int MR, int R, int NV>
INLINE void stream_tile(const float* x, int64_t ldx, const float* w, int64_t ldw, float* c,
                        bool first) {
  vf sum[MR][NV];
#pragma GCC unroll 24
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 24
    for (int v = 0; v < NV; ++v) sum[m][v] = first ? vf{} : load(c + m * ldw + v * kLanes);
#pragma GCC unroll 24
  for (int r = 0; r < R; ++r) {
    vf b[NV];
#pragma GCC unroll 24
    for (int v = 0; v < NV; ++v) {
      __builtin_prefetch(w + (r + R) * ldw + v * kLanes, 0, 2);
      b[v] = load(w + r * ldw + v * kLanes);
    }
#pragma GCC unroll 24
    for (int m = 0; m < MR; ++m) {
      vf a = splat(x[m * ldx + r]);
#pragma GCC unroll 24
      for (int v = 0; v < NV; ++v) sum[m][v] = fma(a, b[v], sum[m][v]);
    }
  }
#pragma GCC unroll 24
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 24
    for (int v = 0; v < NV; ++v) store(c + m * ldw + v * kLanes, sum[m][v]);
}

struct Matmul {
  const float* x;
  const float* w;
  float* out;
  int64_t m, k, n;

  // Rows a tile: as few tiles as registers allow, of even height.
  int64_t height() const {
    int64_t tiles = (m + kTileM - 1) / kTileM;
    return (m + tiles - 1) / tiles;
  }

  // All rows of x times one panel of NV vectors; `from` holds rows k0 .. k0 + depth of it.
  template <int MR, int NV>
  void panel(const float* from, int64_t ldw, int64_t k0, int64_t depth, float* c, int64_t ldc,
             const float* next) const {
    int64_t tiles = (m + MR - 1) / MR, part = (depth + tiles - 1) / tiles;
    int64_t high = m - tiles * (MR - 1);  // so many tiles of MR rows, then tiles of one row less
    for (int64_t t = 0, i = 0; t < tiles; ++t) {
      const float* xi = x + i * k + k0;
      Ahead ahead{next ? next + t * part * n : nullptr, n, tiles};
      constexpr int low = MR > 1 ? MR - 1 : 1;
      if (t < high) {
        tile<MR, NV>(depth, xi, k, from, ldw, c + i * ldc, ldc, k0 == 0, ahead);
        i += MR;
      } else {
        tile<low, NV>(depth, xi, k, from, ldw, c + i * ldc, ldc, k0 == 0, ahead);
        i += low;
      }
    }
  }

  // Columns [j, end) read where they are, in panels of NV vectors; returns the first column left.
  template <int MR, int NV>
  int64_t direct(int64_t j, int64_t end) const {
    constexpr int64_t wide = NV * kLanes;
    for (; j + wide <= end; j += wide) {
      const float* next = j + 2 * wide <= end ? w + j + wide : nullptr;
      panel<MR, NV>(w + j, n, 0, k, out + j, n, next);
    }
    return j;
  }

  // Few rows: the sums stay in the output (L1) and weights are read nearly in the order they are stored,
  // R rows at a time, with the next R rows fetched early: this is what reaches the memory's rate.
  template <int MR, int R, int NV>
  void stream(int64_t k0, int64_t k1, int64_t j, int64_t end) const {
    for (int64_t at = k0; at + R <= k1; at += R)
      for (int64_t col = j; col < end; col += NV * kLanes)
        stream_tile<MR, R, NV>(x + at, k, w + at * n + col, n, out + col, at == 0);
  }

  template <int MR, int R, int NV>
  int64_t streamed(int64_t j, int64_t end) const {
    int64_t stop = j + (end - j) / (NV * kLanes) * (NV * kLanes), whole = k / R * R;
    stream<MR, R, NV>(0, whole, j, stop);
    stream<MR, 1, NV>(whole, k, j, stop);
    return stop;
  }

  // The columns [j, end) that fill no vector: weights are packed into blocks padded with zeros.
  template <int MR>
  void ragged(int64_t j, int64_t end) const {
    if (j >= end) return;
    int64_t width = end - j;
    float *block = scratch((kBlockK + m) * kLanes), *c = block + kBlockK * kLanes;
    for (int64_t k0 = 0; k0 < k; k0 += kBlockK) {
      int64_t depth = std::min(kBlockK, k - k0);
      std::fill(block, block + depth * kLanes, 0.0f);
      for (int64_t i = 0; i < depth; ++i)
        std::memcpy(block + i * kLanes, w + (k0 + i) * n + j, width * sizeof(float));
      panel<MR, 1>(block, kLanes, k0, depth, c, kLanes, nullptr);
    }
    for (int64_t i = 0; i < m; ++i)
      std::memcpy(out + i * n + j, c + i * kLanes, width * sizeof(float));
  }

  template <int MR>
  void columns(int64_t j, int64_t end) const {
    bool few = false;
    if constexpr (MR <= kStreamed) {
      few = m == MR;
      if (few && MR == 3) j = streamed<MR, 16, 2>(j, end);
      if (few) j = streamed<MR, (MR == 1 ? 8 : 16), 1>(j, end);
    }
    if (!few) {
      j = direct<MR, width_for(MR)>(j, end);
      if constexpr (width_for(MR) > kTileV) j = direct<MR, kTileV>(j, end);
      j = direct<MR, 1>(j, end);
    }
    ragged<MR>(j, end);
  }

  template <int... I>
  void columns(int64_t j, int64_t end, Seq<I...>) const {
    int64_t rows = height();
    (void)((rows == I + 1 && (columns<I + 1>(j, end), true)) || ...);
  }

  // One of `parts` parts of the columns.
  void columns(int64_t part, int64_t parts, int64_t vectors) const {
    columns(vectors * part / parts * kLanes, std::min(n, vectors * (part + 1) / parts * kLanes),
            MakeSeq<kTileM>::type{});
  }

  void run(ffi::ThreadPool& pool) const {
    int64_t vectors = (n + kLanes - 1) / kLanes;
    int64_t tasks = std::min(vectors, tasks_for(pool, k * n, kTaskWork));
    parallel(pool, tasks, [&](int64_t t) { columns(t, tasks, vectors); });
  }
};

// Rows of x[M, K] sorted by group, each times its group's w[E][K, N]: a `Matmul` of every group that has
// rows, all of them cut into columns by their work. Rows beyond the groups' sum are zeros.
struct GroupedMatmul {
  const float* x;
  const float* w;
  const int32_t* sizes;
  float* out;
  int64_t m, k, n, groups;

  void run(ffi::ThreadPool& pool) const {
    struct Task {
      Matmul of;
      int64_t part, parts;
    };
    std::vector<Matmul> touched;
    int64_t row = 0, total = 0, vectors = (n + kLanes - 1) / kLanes;
    // Reading a weight takes about as long as eight rows' sums with it.
    auto work = [&](int64_t rows) { return k * n * (8 + rows) / 8; };
    for (int64_t e = 0; e < groups; ++e) {
      int64_t count = std::clamp<int64_t>(sizes[e], 0, m - row);
      if (!count) continue;
      touched.push_back({x + row * k, w + e * k * n, out + row * n, count, k, n});
      total += work(count);
      row += count;
    }
    std::fill(out + row * n, out + m * n, 0.0f);
    int64_t wanted = tasks_for(pool, total, kTaskWork);
    std::vector<Task> tasks;
    for (const Matmul& of : touched) {
      int64_t parts = std::min(vectors, 1 + wanted * work(of.m) / (total + 1));
      for (int64_t i = 0; i < parts; ++i) tasks.push_back({of, i, parts});
    }
    parallel(pool, tasks.size(), [&](int64_t i) {
      tasks[i].of.columns(tasks[i].part, tasks[i].parts, vectors);
    });
  }
};
