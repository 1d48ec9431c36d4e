// Where the entries of a row's tokens lie in a paged pool, their transposed copies, and their writes.
// Never reads a table entry outside the table; page 0 and ids outside the pool are "no page".
#pragma once

#include <algorithm>

#include "vec.h"

constexpr int64_t kChunk = 64;  // keys taken at once; 2 * kLanes divides it

struct Pages {
  const int32_t *tables, *base;
  int64_t heads, dim, page, pages, pool_pages;  // pool[pool_pages, heads, page, dim], tables[, pages]

  // Positions [first(n), end(n)) have a place in row n's table.
  int64_t first(int64_t n) const { return base[n] * page; }
  int64_t end(int64_t n) const { return (base[n] + pages) * page; }

  // Where head h of a page's first position lies, or -1: no page.
  int64_t origin(int64_t n, int64_t h, int64_t number) const {
    int64_t index = number - base[n];
    int64_t id = index >= 0 && index < pages ? tables[n * pages + index] : 0;
    return id > 0 && id < pool_pages ? (id * heads + h) * page * dim : -1;
  }

  int64_t place(int64_t n, int64_t h, int64_t position) const {
    int64_t from = origin(n, h, position / page);
    return from < 0 ? -1 : from + position % page * dim;
  }

  // at[i] = the place of position chunk + i, or -1: not in [from, to), or on no page.
  void places(int64_t n, int64_t h, int64_t chunk, int64_t from, int64_t to, int64_t* at) const {
    int64_t number = chunk / page, offset = chunk % page;
    for (int64_t i = 0; i < kChunk; ++number, offset = 0) {
      int64_t start = origin(n, h, number);
      for (; offset < page && i < kChunk; ++offset, ++i) {
        bool wanted = start >= 0 && chunk + i >= from && chunk + i < to;
        at[i] = wanted ? start + offset * dim : -1;
      }
    }
  }

  // The entries at[0 .. kLanes) as columns of kt[dim, kChunk]; zeros where at is -1.
  INLINE void transposed(const float* pool, const int64_t* at, float* kt) const {
    bool all = true;
    for (int64_t l = 0; l < kLanes; ++l) all = all && at[l] >= 0;
    int64_t d = 0;
    for (; all && d + kLanes <= dim; d += kLanes) {
      vf r[kLanes];
#pragma GCC unroll 16
      for (int64_t l = 0; l < kLanes; ++l) r[l] = load(pool + at[l] + d);
      transpose(r);
#pragma GCC unroll 16
      for (int64_t l = 0; l < kLanes; ++l) store(kt + (d + l) * kChunk, r[l]);
    }
    for (; d < dim; ++d)
      for (int64_t l = 0; l < kLanes; ++l) kt[d * kChunk + l] = at[l] < 0 ? 0.0f : pool[at[l] + d];
  }

  INLINE void fetch(const float* pool, int64_t at) const {
    if (at < 0) return;
    for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(pool + at + d, 0, 2);  // a cache line
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
