// The operator of attention over a cache.
#include <algorithm>

#include "bindings.h"
#include "cpu/attention.h"
#include "cpu/dispatch.h"
#include "cpu/scratch.h"

namespace tilewright {
namespace {

constexpr int64_t kChunk = 256;  // cached tokens: enough work for a thread, and no dependence on how many there are

Cached cached(const Tensor& t, const char* name, const Tensor& q) {
  TILEWRIGHT_CHECK(t.dim() == 4 && t.size(0) == q.size(0) && t.size(2) > 0 && t.size(3) > 0, name, " is ", shape(t),
                   ", it must be [batch, kv_heads, length, size] of the batch of q, which is ", shape(q));
  TILEWRIGHT_CHECK(t.scalar_type() == q.scalar_type(), name, " must be of the dtype of q");
  return {checked_data(t, name), t.size(3), t.stride(0), t.stride(1), t.stride(2)};
}

// With consecutive elements in each row, a copy if need be.
Tensor in_rows(const Tensor& t) {
  return t.dim() != 4 || t.stride(3) == 1 || t.size(3) == 1 ? t : torch::stable::contiguous(t);
}

Tensor attend(const Tensor& queries, const Tensor& keys, const Tensor& values, double scale) {
  check_memory(queries, "q"), check_memory(keys, "key"), check_memory(values, "value");
  const Tensor q = in_rows(queries), key = in_rows(keys), value = in_rows(values);
  TILEWRIGHT_CHECK(q.dim() == 4 && q.size(2) == 1, "q must be [batch, heads, 1, size], it is ", shape(q));
  Attention p{};
  p.dtype = float_type(q, "q");
  p.key = cached(key, "key", q);
  p.value = cached(value, "value", q);
  p.batch = q.size(0), p.heads = q.size(1), p.kv_heads = key.size(1), p.length = key.size(2);
  TILEWRIGHT_CHECK(value.size(1) == p.kv_heads && value.size(2) == p.length, "key is ", shape(key), ", value is ",
                   shape(value));
  TILEWRIGHT_CHECK(q.size(3) == p.key.size && p.kv_heads > 0 && p.heads % p.kv_heads == 0, "q is ", shape(q),
                   ", key is ", shape(key), ": sizes must be equal, and the heads of q a multiple of those of key");
  p.q = q.const_data_ptr();
  p.q_batch_stride = q.stride(0), p.q_stride = q.stride(1);
  p.scale = float(scale);
  Tensor y = torch::stable::new_empty(q, {p.batch, 1, p.heads, p.value.size});
  if (y.numel() == 0) return y;
  p.y = y.mutable_data_ptr();
  p.chunk = std::min(p.length, kChunk);
  p.chunks = ceil_div(p.length, kChunk);
  p.parts = static_cast<float*>(
      scratch(Scratch::shared, size_t(checked_product({p.batch, p.heads, p.chunks, p.part_size(), sizeof(float)}))));
  const Isa& isa = tilewright::isa();
  // A thread is worth its start for about 2^16 products.
  const int64_t grain = 1 + (int64_t(1) << 16) / (p.group() * p.chunk * (p.key.size + p.value.size));
  torch::stable::parallel_for(0, p.tasks(), grain, [&](int64_t begin, int64_t end) {
    isa.attend(&p, begin, end, scratch(Scratch::own, attention_bytes(p)));
  });
  torch::stable::parallel_for(0, p.batch * p.heads, 1 + (int64_t(1) << 16) / (p.chunks * p.value.size),
                              [&](int64_t begin, int64_t end) { isa.join_chunks(&p, begin, end); });
  return y;
}

}  // namespace
}  // namespace tilewright

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("attend(Tensor q, Tensor key, Tensor value, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) { m.impl("attend", TORCH_BOX(&tilewright::attend)); }
