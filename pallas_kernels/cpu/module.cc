// The FFI entry points of the native CPU kernels. Python has checked the shapes (pallas_kernels/ops.py).
#include "attention.h"
#include "dots.h"
#include "norm.h"

using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;
using Out = ffi::ResultBuffer<ffi::F32>;

static ffi::Error matmul(ffi::ThreadPool pool, F32 x, F32 w, Out out, bool transposed) {
  auto xd = x.dimensions(), od = out->dimensions();
  if (transposed) {
    Dots{x.typed_data(), w.typed_data(), out->typed_data(), xd[0], xd[1], od[1]}.run(pool);
  } else {
    Matmul{x.typed_data(), w.typed_data(), out->typed_data(), xd[0], xd[1], od[1]}.run(pool);
  }
  return ffi::Error::Success();
}

static ffi::Error attention(ffi::ThreadPool pool, F32 q, F32 k, F32 v, I32 tables, I32 base,
                            I32 start, Out out, int64_t window, float scale, float softcap) {
  auto qd = q.dimensions(), kd = k.dimensions();
  Attention{q.typed_data(), k.typed_data(),      v.typed_data(), tables.typed_data(),
            base.typed_data(), start.typed_data(), out->typed_data(), qd[0], qd[1], qd[2], qd[3],
            kd[1], kd[2], tables.dimensions()[1], kd[0], window, scale, softcap}
      .run(pool);
  return ffi::Error::Success();
}

static ffi::Error rms_norm(ffi::ThreadPool pool, F32 x, F32 weight, Out out, float eps) {
  auto xd = x.dimensions();
  RmsNorm{x.typed_data(), weight.typed_data(), out->typed_data(), xd[0], xd[1], eps}.run(pool);
  return ffi::Error::Success();
}

// The pools are aliased to the results, so they are not arguments that are read.
static ffi::Error kv_write(F32, F32, F32 k, F32 v, I32 page, I32 offset, Out k_pool, Out v_pool) {
  auto pd = k_pool->dimensions();
  int64_t tokens = k.dimensions()[0];
  write_entries(k_pool->typed_data(), k.typed_data(), page.typed_data(), offset.typed_data(), tokens,
                pd[1], pd[2], pd[0], pd[3]);
  write_entries(v_pool->typed_data(), v.typed_data(), page.typed_data(), offset.typed_data(), tokens,
                pd[1], pd[2], pd[0], pd[3]);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_matmul, matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Ret<F32>()
                                  .Attr<bool>("transposed"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_paged_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<F32>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Attr<float>("softcap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_rms_norm, rms_norm,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Ret<F32>()
                                  .Attr<float>("eps"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_kv_write, kv_write,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<F32>()
                                  .Ret<F32>());
