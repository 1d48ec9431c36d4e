// The keys that score highest for a query: sum over heads of w * relu(q . k), ties to the lower position.
// A score is one chain of fused multiply-adds over dims, then one over heads, whatever tile holds it: it
// never depends on the other rows, on the chunk, or on the width of the table.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"

struct Select {
  const float *q, *w, *pool;
  Pages at_page;
  const int32_t* start;
  int32_t* out;
  int64_t rows, queries, heads, dim, topk;
  float scale;

  static constexpr int64_t kScores = 1 << 24;  // most scores that are kept at once

  struct Tile {
    int64_t n, first, count;  // row, first query, queries
  };

  int64_t tile_queries() const {
    return std::max<int64_t>(1, std::min({queries, kQueries, kTileRows / heads}));
  }
  int64_t blocks() const { return (queries + tile_queries() - 1) / tile_queries(); }
  // Places of a row's table; scores are kept by place.
  int64_t width() const { return at_page.pages * at_page.page; }
  // How many places the row's query `i` may see.
  int64_t seen(int64_t n, int64_t i) const {
    return std::clamp<int64_t>(start[n] + i + 1 - at_page.first(n), 0, width());
  }

  Tile tile_at(int64_t index) const {
    int64_t first = index % blocks() * tile_queries();
    return {index / blocks(), first, std::min(tile_queries(), queries - first)};
  }

  // scores[query of the tile, place] for places [segment, segment + kSegment).
  void score(const Tile& t, int64_t segment, float* scores) const {
    int64_t r = t.count * heads, end = std::min(segment + kSegment, seen(t.n, t.first + t.count - 1));
    float *qs = scratch(r * dim + dim * kChunk + r * kChunk), *kt = qs + r * dim;
    float* s = kt + dim * kChunk;
    const float* from = q + (t.n * queries + t.first) * heads * dim;
    for (int64_t i = 0; i < r * dim; ++i) qs[i] = scale * from[i];
    int64_t at[kChunk], origin = at_page.first(t.n);
    for (int64_t chunk = segment; chunk < end; chunk += kChunk) {
      at_page.places(t.n, 0, origin + chunk, origin + chunk, origin + end, at);
      for (int64_t i = 0; i < kChunk; i += kLanes) at_page.transposed(pool, at + i, kt + i);
      Small{r, dim, qs, dim, kt, kChunk, s, kChunk, kChunk, true}.run();
      for (int64_t c = 0; c < t.count; ++c)
        weigh(w + (t.n * queries + t.first + c) * heads, s + c * heads * kChunk,
              scores + c * width() + chunk, std::min(kChunk, end - chunk));
    }
  }

  // to[0 .. count) = sum over heads of weight * relu(s[head]).
  INLINE void weigh(const float* weight, const float* s, float* to, int64_t count) const {
    for (int64_t i = 0; i < count; i += kLanes) {
      vf sum{};
      for (int64_t h = 0; h < heads; ++h) {
        vf x = load(s + h * kChunk + i);
        sum = fma(splat(weight[h]), x < 0.0f ? vf{} : x, sum);  // a NaN stays one
      }
      std::memcpy(to + i, &sum, std::min(kLanes, count - i) * sizeof(float));
    }
  }

  // A number that orders like the score, NaN above all. No score is -0: its sum began with 0.
  static uint32_t ordered(float score) {
    if (score != score) return ~0u;
    uint32_t bits;
    std::memcpy(&bits, &score, sizeof bits);
    return bits >> 31 ? ~bits : bits | 1u << 31;
  }

  void pick(int64_t n, int64_t i, const float* scores) const {
    int64_t places = seen(n, i), count = 0, origin = at_page.first(n), page = at_page.page;
    int32_t* to = out + (n * queries + i) * topk;
    auto* best = reinterpret_cast<uint64_t*>(scratch(2 * places));
    for (int64_t from = 0; from < places; from += page) {
      if (at_page.origin(n, 0, (origin + from) / page) < 0) continue;
      for (int64_t p = from; p < std::min(places, from + page); ++p)
        best[count++] = uint64_t(ordered(scores[p])) << 32 | ~uint32_t(p);
    }
    int64_t taken = std::min(count, topk);
    if (taken < count) std::nth_element(best, best + taken, best + count, std::greater<uint64_t>());
    for (int64_t j = 0; j < taken; ++j) to[j] = int32_t(origin + ~uint32_t(best[j]));
    if (taken < count) std::sort(to, to + taken);
    std::fill(to + taken, to + topk, -1);
  }

  void run(ffi::ThreadPool& pool) const {
    int64_t tiles = rows * blocks(), size = tile_queries() * width();
    int64_t wave = std::max<int64_t>(1, std::min(tiles, kScores / std::max<int64_t>(1, size)));
    std::unique_ptr<float[]> scores(new float[wave * size]);
    for (int64_t first = 0; first < tiles; first += wave) {
      int64_t count = std::min(wave, tiles - first);
      std::vector<std::pair<int64_t, int64_t>> tasks, picks;  // tile and segment; tile and query
      for (int64_t i = 0; i < count; ++i) {
        Tile t = tile_at(first + i);
        int64_t end = seen(t.n, t.first + t.count - 1);
        for (int64_t s = 0; s < end; s += kSegment) tasks.push_back({i, s});
        for (int64_t c = 0; c < t.count; ++c) picks.push_back({i, c});
      }
      parallel(pool, tasks.size(), [&](int64_t i) {
        auto [tile, segment] = tasks[i];
        score(tile_at(first + tile), segment, &scores[tile * size]);
      });
      parallel(pool, picks.size(), [&](int64_t i) {
        auto [tile, c] = picks[i];
        Tile t = tile_at(first + tile);
        pick(t.n, t.first + c, &scores[tile * size + c * width()]);
      });
    }
  }
};
