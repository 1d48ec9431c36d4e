// RMS norm of rows: out = x / sqrt(mean(x^2) + eps) * weight, every row by the same order of sums.
#pragma once

#include <algorithm>
#include <cmath>

#include "parallel.h"
#include "vec.h"

struct RmsNorm {
  const float* x;
  const float* weight;
  float* out;
  int64_t rows, dim;
  float eps;

  void row(int64_t i) const {
    const float* from = x + i * dim;
    float* to = out + i * dim;
    vf squares[4] = {};
    int64_t d = 0;
    for (; d + 4 * kLanes <= dim; d += 4 * kLanes)
      for (int u = 0; u < 4; ++u) {
        vf a = load(from + d + u * kLanes);
        squares[u] = fma(a, a, squares[u]);
      }
    float rest = 0.0f;
    for (int64_t r = d; r < dim; ++r) rest += from[r] * from[r];
    float sum = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3])) + rest;
    float by = 1.0f / std::sqrt(sum / float(dim) + eps);
    d = 0;
    for (; d + kLanes <= dim; d += kLanes)
      store(to + d, load(from + d) * by * load(weight + d));
    for (; d < dim; ++d) to[d] = from[d] * by * weight[d];
  }

  void run(ffi::ThreadPool& pool) const {
    int64_t tasks = std::min(rows, tasks_for(pool, rows * dim, 1 << 14));
    if (rows * dim < 1 << 16) tasks = 1;  // shorter than waking another thread
    parallel(pool, tasks, [&](int64_t t) {
      for (int64_t i = rows * t / tasks; i < rows * (t + 1) / tasks; ++i) row(i);
    });
  }
};
