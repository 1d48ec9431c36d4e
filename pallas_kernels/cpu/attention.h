// Attention over paged keys and values: over all that precede a query, or over those that a list names
// (then "position" below is a place in the list). Keys and values may be the same entries.
// Keys are taken in chunks that start at multiples of kChunk, chunks in segments that start at multiples
// of kSegment, each segment with its own running maximum; segments are merged in order. So a query's
// result never depends on the other rows, on the split of the work, or on how its prompt was chunked.
// What unseen places hold, NaN included, never matters.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "matmul.h"
#include "pages.h"

constexpr int64_t kSegment = 512;  // keys of one independent partial result
constexpr int64_t kQueries = 16;   // most positions of one tile,
constexpr int64_t kTileRows = 128;  // and rows, a head of a position each, while it has several
constexpr int64_t kFewTiles = 8;   // below this, segments are spread over the cores,
constexpr int64_t kWave = 64;      // so many at a time
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
// A block of columns is taken by all rows before the next, so that its weights stay near.
struct Small {
  int64_t rows, depth;
  const float* x;
  int64_t ldx;
  const float* w;
  int64_t ldw;
  float* c;
  int64_t ldc, width;
  bool first;

  static constexpr int kMost = 6, kWide = kTileM * kTileV >= 24 ? 24 / kMost : 2;

  template <int NV, int MR>
  INLINE void part(int64_t i, int64_t j) const {
    tile<MR, NV>(depth, x + i * ldx, ldx, w + j, ldw, c + i * ldc + j, ldc, first, Ahead{});
  }
  template <int NV, int... I>
  INLINE void rest(int64_t i, int64_t j, Seq<I...>) const {
    (void)((rows - i == I + 1 && (part<NV, I + 1>(i, j), true)) || ...);
  }
  template <int NV>
  INLINE int64_t columns(int64_t j) const {
    for (; j + NV * kLanes <= width; j += NV * kLanes) {
      int64_t i = 0;
      for (; i + kMost <= rows; i += kMost) part<NV, kMost>(i, j);
      rest<NV>(i, j, MakeSeq<kMost - 1>::type{});
    }
    return j;
  }
  void run() const { columns<1>(columns<2>(columns<kWide>(0))); }
};

struct Attention {
  const float *q, *k_pool, *v_pool;
  Pages at_page;
  const int32_t *start, *chosen;  // one of the two is null; chosen[rows, queries, listed]
  const float* sinks;             // a logit of each head, or null
  float* out;
  int64_t rows, queries, heads, dim, value_dim, listed, window;
  float scale, softcap;

  int64_t group() const { return heads / at_page.heads; }
  int64_t wide() const { return round_up(value_dim, kLanes); }
  int64_t stride() const { return wide() + kLanes; }  // of copied values: no power of two, for L1
  // One partial result: m, sum and acc of every query and head of a tile.
  int64_t partial_size(int64_t count) const { return count * group() * (wide() + 2); }
  int64_t tile_queries() const {
    int64_t most = chosen ? 1 : std::min({queries, kQueries, kTileRows / group()});
    return std::max<int64_t>(1, most);
  }

  int64_t oldest(int64_t pos) const { return window ? std::max<int64_t>(0, pos - window + 1) : 0; }

  struct Tile {
    int64_t n, h, first, count;  // row, kv head, first query, queries
    int64_t pos;                 // position of the first query
  };

  const int32_t* list(const Tile& t) const { return chosen + (t.n * queries + t.first) * listed; }

  // at[i] = where key chunk + i lies in a pool, or -1: not in [from, to), or on no page of the table.
  void places(const Tile& t, int64_t chunk, int64_t from, int64_t to, int64_t* at) const {
    if (!chosen) return at_page.places(t.n, t.h, chunk, from, to, at);
    for (int64_t i = 0; i < kChunk; ++i) {
      int64_t position = chunk + i >= from && chunk + i < to ? list(t)[chunk + i] : -1;
      at[i] = position < 0 ? -1 : at_page.place(t.n, t.h, position);
    }
  }

  INLINE void fetch(int64_t at) const {
    at_page.fetch(k_pool, at);
    if (v_pool != k_pool) at_page.fetch(v_pool, at);
  }

  // One chunk's keys (transposed) and values; meanwhile those at `next` are fetched.
  void gather(const int64_t* at, const int64_t* next, float* kt, float* v) const {
    const int64_t w = wide(), ld = stride();
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      for (int64_t l = i; l < i + kLanes; ++l) {
        fetch(next[l]);
        if (at[l] < 0) {
          std::memset(v + l * ld, 0, w * sizeof(float));
        } else if (value_dim == w) {
          for (int64_t d = 0; d < w; d += kLanes) store(v + l * ld + d, load(v_pool + at[l] + d));
        } else {
          std::memcpy(v + l * ld, v_pool + at[l], value_dim * sizeof(float));
        }
      }
      at_page.transposed(k_pool, at + i, kt + i);
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
    int64_t g = group(), w = wide(), ld = stride(), r = t.count * g;
    float *acc = part, *m = part + r * w, *total = m + r;
    std::fill(acc, acc + r * w, 0.0f);
    std::fill(m, m + r, kLowest);
    std::fill(total, total + r, 0.0f);
    float *qs = work, *kt = qs + r * dim, *v = kt + dim * kChunk, *s = v + kChunk * ld;
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
      Small{r, dim, qs, dim, kt, kChunk, s, kChunk, kChunk, true}.run();
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
        Small{r, end, s, kChunk, v, ld, acc, w, w, false}.run();
        continue;
      }
      for (int64_t c = 0; c < t.count; ++c) {  // each query takes only what it sees: 0 * NaN is NaN
        int64_t low = std::max<int64_t>(0, oldest(t.pos + c) - chunk);
        int64_t high = std::min(end, t.pos + c + 1 - chunk);
        if (low < high)
          Small{g, high - low, s + c * g * kChunk + low, kChunk, v + low * ld, ld,
                       acc + c * g * w, w, w, false}.run();
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
      float* to = out + ((t.n * queries + t.first + i / g) * heads + t.h * g + i % g) * value_dim;
      float by = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
      for (int64_t d = 0; d < value_dim; ++d) to[d] = total[i] == 0.0f ? 0.0f : all[i * w + d] * by;
    }
  }

  // First and one past the last segment that the tile sees; keys beyond the table are not held.
  std::pair<int64_t, int64_t> segments(const Tile& t) const {
    int64_t first = oldest(t.pos), last = t.pos + t.count - 1;
    if (!chosen) {
      first = std::max(first, at_page.first(t.n));
      last = std::min(last, at_page.end(t.n) - 1);
    }
    return {first / kSegment, last < first ? first / kSegment : last / kSegment + 1};
  }

  int64_t tiles() const {
    return rows * at_page.heads * ((queries + tile_queries() - 1) / tile_queries());
  }

  Tile tile_at(int64_t index) const {
    int64_t most = tile_queries(), blocks = (queries + most - 1) / most;
    Tile t;
    t.first = index % blocks * most;
    t.h = index / blocks % at_page.heads;
    t.n = index / blocks / at_page.heads;
    t.count = std::min(most, queries - t.first);
    if (chosen) {
      for (t.pos = listed - 1; t.pos >= 0 && list(t)[t.pos] < 0;) --t.pos;
    } else {
      t.pos = start[t.n] + t.first;
    }
    return t;
  }

  int64_t work_size() const {
    int64_t r = tile_queries() * group();
    return r * dim + dim * kChunk + kChunk * stride() + r * kChunk;
  }

  // The sums before any key; a sink is a weight that came first and had no value.
  void clear(const Tile& t, float* all) const {
    int64_t g = group(), r = t.count * g;
    float *m = all + r * wide(), *total = m + r;
    std::fill(all, m, 0.0f);
    for (int64_t i = 0; i < r; ++i) {
      m[i] = sinks ? std::max(sinks[t.h * g + i % g], kLowest) : kLowest;
      total[i] = sinks ? 1.0f : 0.0f;
    }
  }

  void run(ffi::ThreadPool& pool) const {
    if (tiles() < kFewTiles) return run_segments(pool);
    parallel(pool, tiles(), [&](int64_t i) {
      Tile t = tile_at(i);
      auto [a, b] = segments(t);
      int64_t size = partial_size(t.count), r = t.count * group();
      float *all = scratch(2 * size + work_size()), *part = all + size;
      clear(t, all);
      for (int64_t s = a; s < b; ++s) {
        partial(t, s * kSegment, part, part + size);
        merge(r, all, part);
      }
      finish(t, all);
    });
  }

  // The same sums with every segment a task of its own: few rows with long contexts use every core.
  void run_segments(ffi::ThreadPool& pool) const {
    std::vector<Tile> tile(tiles());
    std::vector<std::pair<int64_t, int64_t>> tasks;  // of which tile, from which key on
    int64_t size = partial_size(tile_queries());
    std::vector<float> all(tile.size() * size);
    for (int64_t i = 0; i < int64_t(tile.size()); ++i) {
      tile[i] = tile_at(i);
      clear(tile[i], &all[i * size]);
      auto [a, b] = segments(tile[i]);
      for (int64_t s = a; s < b; ++s) tasks.push_back({i, s * kSegment});
    }
    int64_t left = tasks.size();
    std::vector<float> parts(std::min(left, kWave) * size);
    for (auto* wave = tasks.data(); left > 0; wave += kWave, left -= kWave) {
      int64_t count = std::min(left, kWave);
      parallel(pool, count, [&](int64_t i) {
        partial(tile[wave[i].first], wave[i].second, &parts[i * size], scratch(work_size()));
      });
      for (int64_t i = 0; i < count; ++i) {
        int64_t of = wave[i].first;
        merge(tile[of].count * group(), &all[of * size], &parts[i * size]);
      }
    }
    for (int64_t i = 0; i < int64_t(tile.size()); ++i) finish(tile[i], &all[i * size]);
  }
};
