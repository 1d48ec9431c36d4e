// The FFI entry points of the native CPU kernels. Python has checked the shapes (pallas_kernels/ops.py).
#include "attention.h"
#include "dots.h"
#include "norm.h"
#include "recurrent_entry.h"
#include "select.h"

using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;
using Out = ffi::ResultBuffer<ffi::F32>;
using OutI32 = ffi::ResultBuffer<ffi::S32>;

static ffi::Error matmul(ffi::ThreadPool pool, F32 x, F32 w, Out out, bool transposed) {
  auto xd = x.dimensions(), od = out->dimensions();
  if (transposed) {
    Dots{x.typed_data(), w.typed_data(), out->typed_data(), xd[0], xd[1], od[1]}.run(pool);
  } else {
    Matmul{x.typed_data(), w.typed_data(), out->typed_data(), xd[0], xd[1], od[1]}.run(pool);
  }
  return ffi::Error::Success();
}

static ffi::Error grouped_matmul(ffi::ThreadPool pool, F32 x, F32 w, I32 sizes, Out out) {
  auto xd = x.dimensions(), wd = w.dimensions();
  GroupedMatmul{x.typed_data(), w.typed_data(), sizes.typed_data(), out->typed_data(),
                xd[0],          xd[1],          wd[2],              wd[0]}
      .run(pool);
  return ffi::Error::Success();
}

static Pages pages_of(F32 pool, I32 tables, I32 base) {
  auto pd = pool.dimensions();
  return {tables.typed_data(), base.typed_data(),      pd[1], pd[3],
          pd[2],               tables.dimensions()[1], pd[0]};
}

// Without sinks, that buffer is empty.
static ffi::Error attention(ffi::ThreadPool pool, F32 q, F32 k, F32 v, I32 tables, I32 base,
                            I32 start, F32 sinks, Out out, int64_t window, float scale,
                            float softcap) {
  auto qd = q.dimensions();
  const float* sink = sinks.element_count() ? sinks.typed_data() : nullptr;
  Attention{q.typed_data(), k.typed_data(), v.typed_data(), pages_of(k, tables, base),
            start.typed_data(), nullptr, sink, out->typed_data(), qd[0], qd[1], qd[2], qd[3], qd[3],
            0, window, scale, softcap}
      .run(pool);
  return ffi::Error::Success();
}

static ffi::Error latent_attention(ffi::ThreadPool pool, F32 q, F32 entries, I32 tables, I32 base,
                                   I32 start, Out out, float scale) {
  auto qd = q.dimensions();
  Attention{q.typed_data(), entries.typed_data(), entries.typed_data(),
            pages_of(entries, tables, base), start.typed_data(), nullptr, nullptr,
            out->typed_data(), qd[0], qd[1], qd[2], qd[3], out->dimensions()[3], 0, 0, scale, 0.0f}
      .run(pool);
  return ffi::Error::Success();
}

static ffi::Error selected_attention(ffi::ThreadPool pool, F32 q, F32 entries, I32 tables, I32 base,
                                     I32 chosen, Out out, float scale) {
  auto qd = q.dimensions();
  Attention{q.typed_data(), entries.typed_data(), entries.typed_data(),
            pages_of(entries, tables, base), nullptr, chosen.typed_data(), nullptr,
            out->typed_data(), qd[0], qd[1], qd[2], qd[3], out->dimensions()[3],
            chosen.dimensions()[2], 0, scale, 0.0f}
      .run(pool);
  return ffi::Error::Success();
}

static ffi::Error index_select(ffi::ThreadPool pool, F32 q, F32 w, F32 keys, I32 tables, I32 base,
                               I32 start, OutI32 out, float scale) {
  auto qd = q.dimensions();
  Select{q.typed_data(), w.typed_data(), keys.typed_data(), pages_of(keys, tables, base),
         start.typed_data(), out->typed_data(), qd[0], qd[1], qd[2], qd[3], out->dimensions()[2],
         scale}
      .run(pool);
  return ffi::Error::Success();
}

static ffi::Error rms_norm(ffi::ThreadPool pool, F32 x, F32 weight, Out out, float eps) {
  auto xd = x.dimensions();
  RmsNorm{x.typed_data(), weight.typed_data(), out->typed_data(), xd[0], xd[1], eps}.run(pool);
  return ffi::Error::Success();
}

// The pools are aliased to the results, so they are not arguments that are read.
static ffi::Error page_write(F32, F32 x, I32 page, I32 offset, Out pool) {
  auto pd = pool->dimensions();
  write_entries(pool->typed_data(), x.typed_data(), page.typed_data(), offset.typed_data(),
                x.dimensions()[0], pd[1], pd[2], pd[0], pd[3]);
  return ffi::Error::Success();
}
static ffi::Error kv_write(F32 old_k, F32 old_v, F32 k, F32 v, I32 page, I32 offset, Out k_pool,
                           Out v_pool) {
  page_write(old_k, k, page, offset, k_pool);
  return page_write(old_v, v, page, offset, v_pool);
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
                                  .Arg<F32>()
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_page_write, page_write,
                              ffi::Ffi::Bind()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_grouped_matmul, grouped_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Ret<F32>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_latent_attention, latent_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<F32>()
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_selected_attention, selected_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<F32>()
                                  .Attr<float>("scale"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxinfer_index_select, index_select,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<F32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Arg<I32>()
                                  .Ret<ffi::Buffer<ffi::S32>>()
                                  .Attr<float>("scale"));
