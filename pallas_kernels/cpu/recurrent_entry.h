// The FFI entry points of the recurrent kernels. Python has checked the shapes (pallas_kernels/recurrent.py).
// The pools are aliased to the results, so they are not arguments that are read.
#pragma once

#include "recurrent.h"

using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;
using Out = ffi::ResultBuffer<ffi::F32>;

static Chains chains_of(I32& read, I32& write, I32& length, int64_t count, int64_t slots) {
  return {read.typed_data(), write.typed_data(), length.typed_data(),
          int64_t(read.element_count()), count, slots};
}

static ffi::Error delta(ffi::ThreadPool threads, F32 q, F32 k, F32 v, F32 g, F32 beta, F32, I32 read,
                        I32 write, I32 length, Out pool, Out out, bool rule) {
  auto kd = k.dimensions(), pd = pool->dimensions();
  Delta{q.typed_data(), k.typed_data(), v.typed_data(), g.typed_data(),
        rule ? beta.typed_data() : nullptr, pool->typed_data(), out->typed_data(),
        chains_of(read, write, length, kd[1], pd[0]), kd[2], pd[1], pd[2], pd[3],
        g.dimensions().size() == 4}
      .run(threads);
  return ffi::Error::Success();
}

static ffi::Error conv(ffi::ThreadPool threads, F32 x, F32 w, F32, I32 read, I32 write, I32 length,
                       Out pool, Out out) {
  auto xd = x.dimensions();
  Conv{x.typed_data(), w.typed_data(), pool->typed_data(), out->typed_data(),
       chains_of(read, write, length, xd[1], pool->dimensions()[0]), xd[2], w.dimensions()[1]}
      .run(threads);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_delta, delta,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<F32>()
                                  .Ret<F32>()
                                  .Attr<bool>("rule"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_conv, conv,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<F32>()
                                  .Ret<F32>());
