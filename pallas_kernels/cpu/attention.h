// Causal attention over paged keys and values, and the write of new entries to their pages.
// Keys are taken in chunks that start at multiples of kChunk, chunks in segments that start at multiples
// of kSegment, each segment with its own running maximum; segments are merged in order. So a query's
// result never depends on the other rows, on the split of the work, or on how its prompt was chunked.
// Never reads a table entry outside the table; what unseen places hold, NaN included, never matters.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "matmul.h"

constexpr int64_t kChunk = 64;     // keys of one step of the online softmax; 2 * kLanes divides it
constexpr int64_t kSegment = 512;  // keys of one independent partial result
constexpr int64_t kQueries = 16;   // positions of one tile
constexpr int64_t kFewTiles = 8;   // below this, segments are spread over the cores
constexpr float kLowest = -1e30f;  // a finite running maximum: exp(m - m) is 1, never NaN

INLINE vf exp(vf x) {
  vf high = x > 88.0f ? splat(88.0f) : x;
  vf n = fma(high, splat(1.44269504f), splat(12582912.0f)) - 12582912.0f;  // an integer
  vf safe = n > -126.0f ? n : splat(-126.0f);
  vf r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), high));
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  vi bits = (__builtin_convertvector(safe, vi) + 127) << 23;
  vf power;
  std::memcpy(&power, &bits, sizeof(vf));
  vf out = p * power;
  return x < -87.0f ? vf{} : out;  // a NaN stays one
}
INLINE vf tanh(vf x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

INLINE float exp_of(float x) { return exp(splat(x))[0]; }

// c[rows, width] (+)= x[rows, depth] @ w[depth, width], all of it in cache; width is whole vectors.
template <int MR>
INLINE void small_rows(int64_t depth, const float* x, int64_t ldx, const float* w, int64_t ldw,
                       float* c, int64_t ldc, int64_t width, bool first) {
  int64_t j = 0;
  for (; j + 2 * kLanes <= width; j += 2 * kLanes)
    tile<MR, 2>(depth, x, ldx, w + j, ldw, c + j, ldc, first, Ahead{});
  if (j < width) tile<MR, 1>(depth, x, ldx, w + j, ldw, c + j, ldc, first, Ahead{});
}
inline void small_matmul(int64_t rows, int64_t depth, const float* x, int64_t ldx, const float* w,
                         int64_t ldw, float* c, int64_t ldc, int64_t width, bool first) {
  int64_t i = 0;
  for (; i + 6 <= rows; i += 6)
    small_rows<6>(depth, x + i * ldx, ldx, w, ldw, c + i * ldc, ldc, width, first);
  for (; i + 3 <= rows; i += 3)
    small_rows<3>(depth, x + i * ldx, ldx, w, ldw, c + i * ldc, ldc, width, first);
  for (; i < rows; ++i)
    small_rows<1>(depth, x + i * ldx, ldx, w, ldw, c + i * ldc, ldc, width, first);
}

struct Attention {
  const float *q, *k_pool, *v_pool;
  const int32_t *tables, *base, *start;
  float* out;
  int64_t rows, queries, heads, dim, kv_heads, page, pages, pool_pages, window;
  float scale, softcap;

  int64_t group() const { return heads / kv_heads; }
  int64_t wide() const { return round_up(dim, kLanes); }
  // One partial result: m, sum and acc of every query and head of a tile.
  int64_t partial_size(int64_t count) const { return count * group() * (wide() + 2); }

  int64_t oldest(int64_t pos) const { return window ? std::max<int64_t>(0, pos - window + 1) : 0; }

  struct Tile {
    int64_t n, h, first, count;  // row, kv head, first query, queries
    int64_t pos;                 // position of the first query
  };

  // at[i] = where key chunk + i lies in a pool, or -1: not in [from, to), or on no page of the table.
  void places(const Tile& t, int64_t chunk, int64_t from, int64_t to, int64_t* at) const {
    int64_t index = chunk / page - base[t.n], offset = chunk % page;
    for (int64_t i = 0; i < kChunk; ++index, offset = 0) {
      int64_t id = index >= 0 && index < pages ? tables[t.n * pages + index] : 0;
      bool held = id > 0 && id < pool_pages;
      const int64_t origin = (id * kv_heads + t.h) * page * dim;
      for (; offset < page && i < kChunk; ++offset, ++i) {
        bool wanted = held && chunk + i >= from && chunk + i < to;
        at[i] = wanted ? origin + offset * dim : -1;
      }
    }
  }

  INLINE void fetch(int64_t at) const {
    if (at < 0) return;
    for (int64_t d = 0; d < dim; d += 16) {  // 16 floats are a cache line
      __builtin_prefetch(k_pool + at + d, 0, 2);
      __builtin_prefetch(v_pool + at + d, 0, 2);
    }
  }

  // One chunk's keys (transposed) and values; meanwhile those at `next` are fetched.
  void gather(const int64_t* at, const int64_t* next, float* kt, float* v) const {
    const int64_t w = wide();
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      bool all = true;
      for (int64_t l = i; l < i + kLanes; ++l) {
        fetch(next[l]);
        all = all && at[l] >= 0;
        if (at[l] < 0) {
          std::memset(v + l * w, 0, w * sizeof(float));
        } else if (dim == w) {
          for (int64_t d = 0; d < w; d += kLanes) store(v + l * w + d, load(v_pool + at[l] + d));
        } else {
          std::memcpy(v + l * w, v_pool + at[l], dim * sizeof(float));
        }
      }
      int64_t d = 0;
      for (; all && d + kLanes <= dim; d += kLanes) {
        vf r[kLanes];
#pragma GCC unroll 16
        for (int64_t l = 0; l < kLanes; ++l) r[l] = load(k_pool + at[i + l] + d);
        transpose(r);
#pragma GCC unroll 16
        for (int64_t l = 0; l < kLanes; ++l) store(kt + (d + l) * kChunk + i, r[l]);
      }
      for (; d < dim; ++d)
        for (int64_t l = i; l < i + kLanes; ++l)
          kt[d * kChunk + l] = at[l] < 0 ? 0.0f : k_pool[at[l] + d];
    }
  }

  // Scores of one query and head become weights, zero outside keys [low, high) and where not held;
  // returns the factor that older sums fade by.
  float weigh(float* s, int64_t low, int64_t high, const vi* held, float& m, float& total) const {
    constexpr int64_t vectors = kChunk / kLanes;
    const vi lane = lane_numbers(Lanes{});
    const vf nothing = splat(-std::numeric_limits<float>::infinity());
    vf z[vectors], top = splat(kLowest), sum{};
    vi seen[vectors];
#pragma GCC unroll 4
    for (int64_t i = 0; i < vectors; ++i) {
      z[i] = load(s + i * kLanes);
      if (softcap > 0) z[i] = softcap * tanh(z[i] / softcap);
      vi index = lane + int32_t(i * kLanes);
      seen[i] = (index >= int32_t(low)) & (index < int32_t(high)) & held[i];
      z[i] = seen[i] ? z[i] : nothing;
      top = max(z[i], top);
    }
    float now = std::max(m, max_of(top)), fade = now == m ? 1.0f : exp_of(m - now);
#pragma GCC unroll 4
    for (int64_t i = 0; i < vectors; ++i) {
      vf p = seen[i] ? exp(z[i] - now) : vf{};
      store(s + i * kLanes, p);
      sum += p;
    }
    m = now;
    total = total * fade + sum_of(sum);
    return fade;
  }

  // The partial result of the tile over keys [segment, segment + kSegment).
  void partial(const Tile& t, int64_t segment, float* part, float* work) const {
    int64_t g = group(), w = wide(), r = t.count * g;
    float *acc = part, *m = part + r * w, *total = m + r;
    std::fill(acc, acc + r * w, 0.0f);
    std::fill(m, m + r, kLowest);
    std::fill(total, total + r, 0.0f);
    float *qs = work, *kt = qs + r * dim, *v = kt + dim * kChunk, *s = v + kChunk * w;
    vi held[kChunk / kLanes];
    int64_t spots[2][kChunk], *at = spots[0], *next = spots[1];
    for (int64_t c = 0; c < t.count; ++c)
      for (int64_t i = 0; i < g * dim; ++i)
        qs[c * g * dim + i] = scale * q[((t.n * queries + t.first + c) * heads + t.h * g) * dim + i];
    int64_t last = t.pos + t.count - 1;
    int64_t from = std::max(segment, oldest(t.pos)), to = std::min(segment + kSegment, last + 1);
    int64_t chunk = from / kChunk * kChunk;
    places(t, chunk, from, to, at);
    for (int64_t i = 0; i < kChunk; ++i) fetch(at[i]);
    for (; chunk < to; chunk += kChunk, std::swap(at, next)) {
      places(t, chunk + kChunk, from, to, next);
      gather(at, next, kt, v);
      for (int64_t i = 0; i < kChunk; ++i) held[i / kLanes][i % kLanes] = at[i] < 0 ? 0 : -1;
      small_matmul(r, dim, qs, dim, kt, kChunk, s, kChunk, kChunk, true);
      int64_t end = std::min(chunk + kChunk, to) - chunk;
      bool whole = chunk + end <= t.pos + 1 && chunk >= oldest(last);
      for (int64_t i = 0; i < r; ++i) {
        int64_t pos = t.pos + i / g;
        int64_t low = std::max<int64_t>(0, oldest(pos) - chunk), high = std::min(end, pos + 1 - chunk);
        float fade = weigh(s + i * kChunk, low, high, held, m[i], total[i]);
        if (fade != 1.0f)
          for (int64_t d = 0; d < w; d += kLanes) store(acc + i * w + d, fade * load(acc + i * w + d));
      }
      if (whole) {
        small_matmul(r, end, s, kChunk, v, w, acc, w, w, false);
        continue;
      }
      for (int64_t c = 0; c < t.count; ++c) {  // each query takes only what it sees: 0 * NaN is NaN
        int64_t low = std::max<int64_t>(0, oldest(t.pos + c) - chunk);
        int64_t high = std::min(end, t.pos + c + 1 - chunk);
        if (low < high)
          small_matmul(g, high - low, s + c * g * kChunk + low, kChunk, v + low * w, w,
                       acc + c * g * w, w, w, false);
      }
    }
  }

  // all = all merged with the next segment's part.
  void merge(int64_t r, float* all, const float* part) const {
    int64_t w = wide();
    float *m = all + r * w, *total = m + r;
    const float *pm = part + r * w, *pt = pm + r;
    for (int64_t i = 0; i < r; ++i) {
      if (pt[i] == 0.0f) continue;  // nothing seen there
      float now = std::max(m[i], pm[i]), a = exp_of(m[i] - now), b = exp_of(pm[i] - now);
      for (int64_t d = 0; d < w; d += kLanes)
        store(all + i * w + d, a * load(all + i * w + d) + b * load(part + i * w + d));
      total[i] = a * total[i] + b * pt[i];
      m[i] = now;
    }
  }

  void finish(const Tile& t, const float* all) const {
    int64_t g = group(), w = wide(), r = t.count * g;
    const float* total = all + r * w + r;
    for (int64_t i = 0; i < r; ++i) {
      float* to = out + ((t.n * queries + t.first + i / g) * heads + t.h * g + i % g) * dim;
      float by = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
      for (int64_t d = 0; d < dim; ++d) to[d] = total[i] == 0.0f ? 0.0f : all[i * w + d] * by;
    }
  }

  // First and one past the last segment that the tile sees; keys beyond the table are not held.
  std::pair<int64_t, int64_t> segments(const Tile& t) const {
    int64_t last = std::min(t.pos + t.count - 1, (base[t.n] + pages) * page - 1);
    int64_t first = std::max(oldest(t.pos), base[t.n] * page);
    return {first / kSegment, last < first ? first / kSegment : last / kSegment + 1};
  }

  Tile tile_at(int64_t index) const {
    int64_t blocks = (queries + kQueries - 1) / kQueries;
    Tile t;
    t.first = index % blocks * kQueries;
    t.h = index / blocks % kv_heads;
    t.n = index / blocks / kv_heads;
    t.count = std::min(kQueries, queries - t.first);
    t.pos = start[t.n] + t.first;
    return t;
  }

  int64_t work_size() const {
    int64_t r = kQueries * group();
    return r * dim + dim * kChunk + kChunk * wide() + r * kChunk;
  }

  void clear(int64_t r, float* all) const {
    std::fill(all, all + r * wide(), 0.0f);
    std::fill(all + r * wide(), all + r * wide() + r, kLowest);
    std::fill(all + r * wide() + r, all + r * wide() + 2 * r, 0.0f);
  }

  void run(ffi::ThreadPool& pool) const {
    int64_t tiles = rows * kv_heads * ((queries + kQueries - 1) / kQueries);
    if (tiles < kFewTiles) return run_segments(pool, tiles);
    parallel(pool, tiles, [&](int64_t i) {
      Tile t = tile_at(i);
      auto [a, b] = segments(t);
      int64_t size = partial_size(t.count), r = t.count * group();
      float *all = scratch(2 * size + work_size()), *part = all + size;
      clear(r, all);
      for (int64_t s = a; s < b; ++s) {
        partial(t, s * kSegment, part, part + size);
        merge(r, all, part);
      }
      finish(t, all);
    });
  }

  // The same sums with every segment a task of its own: few rows with long contexts use every core.
  void run_segments(ffi::ThreadPool& pool, int64_t tiles) const {
    std::vector<std::pair<Tile, int64_t>> tasks;
    for (int64_t i = 0; i < tiles; ++i) {
      auto [a, b] = segments(tile_at(i));
      for (int64_t s = a; s < b; ++s) tasks.push_back({tile_at(i), s * kSegment});
    }
    int64_t size = partial_size(std::min(kQueries, queries));
    std::vector<float> parts((tasks.size() + 1) * size);
    parallel(pool, tasks.size(), [&](int64_t i) {
      partial(tasks[i].first, tasks[i].second, &parts[i * size], scratch(work_size()));
    });
    float *all = &parts[tasks.size() * size], *part = parts.data();
    for (int64_t i = 0; i < tiles; ++i) {
      Tile t = tile_at(i);
      auto [a, b] = segments(t);
      clear(t.count * group(), all);
      for (int64_t s = a; s < b; ++s, part += size) merge(t.count * group(), all, part);
      finish(t, all);
    }
  }
};

// Copies the entries of `tokens` tokens to their pages in one pool; ids outside it are left out.
inline void write_entries(float* pool, const float* entries, const int32_t* page,
                          const int32_t* offset, int64_t tokens, int64_t heads, int64_t page_size,
                          int64_t pages, int64_t dim) {
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t p = page[t], o = offset[t];
    if (p < 0 || p >= pages || o < 0 || o >= page_size) continue;
    for (int64_t h = 0; h < heads; ++h)
      std::memcpy(pool + ((p * heads + h) * page_size + o) * dim, entries + (t * heads + h) * dim,
                  dim * sizeof(float));
  }
}
