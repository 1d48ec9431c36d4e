// The delta rule, linear attention and short causal convolutions over pools of states, token by token.
// A chain of blocks (each goes on from the end of the one before) is one row. Rows, heads and columns of a
// state are independent tasks. A token's arithmetic is the same wherever its block begins and ends, so
// results are bitwise independent of how a sequence is cut and of its neighbours.
// The pools are updated in place: no row reads a slot that another one writes in the same call.
#pragma once

#include <vector>

#include "attention.h"

constexpr int64_t kSerialWork = 1 << 16;  // less is done sooner than another thread wakes up
constexpr int64_t kStateV = 4;            // vectors of a state's columns in one task: its rows stay in L1
constexpr int64_t kChannels = 256;        // channels of a convolution in one task

// Which blocks follow one another, and where their states come from and go to.
struct Chains {
  const int32_t *read, *write, *length;
  int64_t blocks, count, slots;  // blocks of `count` tokens

  int64_t tokens(int64_t n) const { return std::clamp<int64_t>(length[n], 0, count); }
  int64_t source(int64_t n) const { return read[n] > 0 && read[n] < slots ? read[n] : 0; }
  int64_t target(int64_t n) const { return write[n] > 0 && write[n] < slots ? write[n] : 0; }
  // First blocks of all chains, then the number of blocks.
  std::vector<int64_t> bounds() const {
    std::vector<int64_t> out;
    for (int64_t n = 0; n < blocks; ++n)
      if (n == 0 || read[n] >= 0) out.push_back(n);
    out.push_back(blocks);
    return out;
  }
};

struct Delta {
  const float *q, *k, *v, *g, *beta;  // beta is null for plain linear attention
  float *pool, *out;
  Chains chains;
  int64_t key_heads, heads, dk, dv;
  bool by_channel;

  struct State {  // rows of a tile's columns, in the pool or in scratch
    float* at;
    int64_t stride;
  };
  struct Token {  // factors of the dk rows of a state
    float *k, *q, *fade, *faded_k, *faded_q;
    float qk;
  };

  int64_t wide() const { return round_up(dk, kLanes); }
  float* slot(int64_t id, int64_t h) const { return pool + (id * heads + h) * dk * dv; }

  void copy(State from, State to, int64_t width) const {
    if (from.at == to.at) return;
    for (int64_t d = 0; d < dk; ++d)
      std::memcpy(to.at + d * to.stride, from.at + d * from.stride, width * sizeof(float));
  }

  void factors(int64_t t, int64_t h, Token& token) const {
    const int64_t w = wide(), key = (t * key_heads + h / (heads / key_heads)) * dk;
    std::memcpy(token.k, k + key, dk * sizeof(float));  // what lies behind dk is zero
    std::memcpy(token.q, q + key, dk * sizeof(float));
    if (by_channel) {
      std::memcpy(token.fade, g + (t * heads + h) * dk, dk * sizeof(float));
      for (int64_t d = 0; d < w; d += kLanes) store(token.fade + d, exp(load(token.fade + d)));
    } else {
      const vf fade = exp(splat(g[t * heads + h]));
      for (int64_t d = 0; d < w; d += kLanes) store(token.fade + d, fade);
    }
    vf qk{};
    for (int64_t d = 0; d < w; d += kLanes) {
      const vf fade = load(token.fade + d), kd = load(token.k + d), qd = load(token.q + d);
      store(token.faded_k + d, fade * kd);
      store(token.faded_q + d, fade * qd);
      qk = fma(qd, kd, qk);
    }
    token.qk = sum_of(qk);
  }

  // S <- fade S; S <- S + k (beta (v - S^T k))^T; o = S^T q, where what S^T q gains by the update is
  // (q.k) times what was written: one pass reads the state, the other renews it.
  template <int NV>
  INLINE void rule(const Token& x, State from, State to, vf* value, float by) const {
    vf seen[NV] = {}, read[NV] = {};
    for (int64_t d = 0; d < dk; ++d) {
      const vf kd = splat(x.faded_k[d]), qd = splat(x.faded_q[d]);
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) {
        const vf s = load(from.at + d * from.stride + i * kLanes);
        seen[i] = fma(kd, s, seen[i]);
        read[i] = fma(qd, s, read[i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) value[i] = by * (value[i] - seen[i]);
    for (int64_t d = 0; d < dk; ++d) {
      const vf fade = splat(x.fade[d]), kd = splat(x.k[d]);
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) {
        const vf s = load(from.at + d * from.stride + i * kLanes);
        store(to.at + d * to.stride + i * kLanes, fma(kd, value[i], fade * s));
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) value[i] = fma(splat(x.qk), value[i], read[i]);
  }

  // S <- fade S + k v^T; o = S^T q
  template <int NV>
  INLINE void linear(const Token& x, State from, State to, vf* value) const {
    vf read[NV] = {};
    for (int64_t d = 0; d < dk; ++d) {
      const vf fade = splat(x.fade[d]), kd = splat(x.k[d]), qd = splat(x.q[d]);
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) {
        const vf s = fma(kd, value[i], fade * load(from.at + d * from.stride + i * kLanes));
        store(to.at + d * to.stride + i * kLanes, s);
        read[i] = fma(qd, s, read[i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) value[i] = read[i];
  }

  // Columns [col, col + width) of head h along the blocks [first, end); width <= NV * kLanes.
  template <int NV>
  void tile(int64_t first, int64_t end, int64_t h, int64_t col, int64_t width) const {
    constexpr int64_t columns = NV * kLanes;
    const bool whole = width == columns;  // else a state has no room for vectors in the pool
    const int64_t w = wide();
    float* work = scratch(dk * columns + columns + 5 * w);
    float *line = work + dk * columns, *rest = line + columns;
    std::fill(work, rest + 5 * w, 0.0f);
    Token token{rest, rest + w, rest + 2 * w, rest + 3 * w, rest + 4 * w, 0.0f};
    const State own{work, columns};
    State state = own;
    if (int64_t id = chains.source(first)) {
      const State held{slot(id, h) + col, dv};
      if (whole) state = held;
      else copy(held, own, width);
    }
    for (int64_t n = first; n < end; ++n) {
      const int64_t tokens = chains.tokens(n), id = chains.target(n);
      const State kept{id ? slot(id, h) + col : nullptr, dv};
      for (int64_t i = 0; i < chains.count; ++i) {
        const int64_t t = n * chains.count + i, at = (t * heads + h) * dv + col;
        if (i >= tokens) {
          std::memset(out + at, 0, width * sizeof(float));
          continue;
        }
        factors(t, h, token);
        std::memcpy(line, v + at, width * sizeof(float));
        vf value[NV];
        for (int j = 0; j < NV; ++j) value[j] = load(line + j * kLanes);
        const State to = whole && id && i == tokens - 1 ? kept : own;
        if (beta) rule<NV>(token, state, to, value, beta[t * heads + h]);
        else linear<NV>(token, state, to, value);
        for (int j = 0; j < NV; ++j) store(line + j * kLanes, value[j]);
        std::memcpy(out + at, line, width * sizeof(float));
        state = to;
      }
      if (id) copy(state, kept, width);
    }
  }

  void run(ffi::ThreadPool& threads) const {
    constexpr int64_t most = kStateV * kLanes;
    const std::vector<int64_t> bounds = chains.bounds();
    const int64_t tiles = (dv + most - 1) / most, rows = bounds.size() - 1;
    auto task = [&](int64_t i) {
      const int64_t col = i % tiles * most, h = i / tiles % heads, row = i / tiles / heads;
      const int64_t first = bounds[row], end = bounds[row + 1], width = std::min(most, dv - col);
      if (width > 2 * kLanes) tile<kStateV>(first, end, h, col, width);
      else if (width > kLanes) tile<2>(first, end, h, col, width);
      else tile<1>(first, end, h, col, width);
    };
    run_tasks(threads, rows * heads * tiles, chains.blocks * chains.count * heads * dk * dv, task);
  }

  template <typename F>
  static void run_tasks(ffi::ThreadPool& threads, int64_t tasks, int64_t work, const F& task) {
    if (work >= kSerialWork) return parallel(threads, tasks, task);
    for (int64_t i = 0; i < tasks; ++i) task(i);
  }
};

struct Conv {
  const float *x, *w;  // w[channels, taps]
  float *pool, *out;
  Chains chains;
  int64_t channels, taps;

  // Channels [c, c + width): lines[j] is where the input taps - 1 - j tokens ago lies.
  void columns(int64_t c, int64_t width, const std::vector<int64_t>& bounds) const {
    float* weights = scratch((2 * taps - 1) * kChannels);
    float* past = weights + taps * kChannels;
    for (int64_t i = 0; i < width; ++i)
      for (int64_t j = 0; j < taps; ++j) weights[j * kChannels + i] = w[(c + i) * taps + j];
    std::vector<const float*> lines(taps);
    for (size_t row = 0; row + 1 < bounds.size(); ++row) {
      const int64_t id = chains.source(bounds[row]);
      for (int64_t j = 0; j < taps - 1; ++j) {
        float* line = past + j * kChannels;
        if (id) std::memcpy(line, pool + (id * (taps - 1) + j) * channels + c, width * sizeof(float));
        else std::fill(line, line + width, 0.0f);
        lines[j + 1] = line;
      }
      for (int64_t n = bounds[row]; n < bounds[row + 1]; ++n) block(n, c, width, weights, lines);
    }
  }

  void block(int64_t n, int64_t c, int64_t width, const float* weights,
             std::vector<const float*>& lines) const {
    const int64_t tokens = chains.tokens(n);
    for (int64_t i = 0; i < chains.count; ++i) {
      const int64_t at = (n * chains.count + i) * channels + c;
      if (i >= tokens) {
        std::memset(out + at, 0, width * sizeof(float));
        continue;
      }
      for (int64_t j = 0; j < taps - 1; ++j) lines[j] = lines[j + 1];
      lines[taps - 1] = x + at;
      int64_t d = 0;
      for (; d + kLanes <= width; d += kLanes) {
        vf sum = load(weights + d) * load(lines[0] + d);
        for (int64_t j = 1; j < taps; ++j)
          sum = fma(load(weights + j * kChannels + d), load(lines[j] + d), sum);
        store(out + at + d, sum);
      }
      for (; d < width; ++d) {
        float sum = weights[d] * lines[0][d];
        for (int64_t j = 1; j < taps; ++j) sum += weights[j * kChannels + d] * lines[j][d];
        out[at + d] = sum;
      }
    }
    if (const int64_t id = chains.target(n))
      for (int64_t j = 0; j < taps - 1; ++j)
        std::memcpy(pool + (id * (taps - 1) + j) * channels + c, lines[j + 1], width * sizeof(float));
  }

  void run(ffi::ThreadPool& threads) const {
    const std::vector<int64_t> bounds = chains.bounds();
    const int64_t tasks = (channels + kChannels - 1) / kChannels;
    Delta::run_tasks(threads, tasks, chains.blocks * chains.count * channels * taps, [&](int64_t i) {
      columns(i * kChannels, std::min(kChannels, channels - i * kChannels), bounds);
    });
  }
};
