// The operator of norms.
#include <vector>

#include "bindings.h"
#include "cpu/dispatch.h"
#include "cpu/norm.h"
#include "cpu/scratch.h"

namespace tilewright {
namespace {

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  TILEWRIGHT_CHECK(x.dim() >= 1 && x.size(-1) > 0, "x must have at least one dimension and one column, its shape is ",
                   shape(x));
  Norm p{};
  p.k = x.size(-1);
  p.dtype = float_type(x);
  p.weight_dtype = float_type(weight, "weight");
  p.y_dtype = p.dtype == p.weight_dtype ? p.dtype : Float::f32;
  p.epsilon = float(epsilon);
  TILEWRIGHT_CHECK(weight.dim() == 1 && weight.size(0) == p.k && weight.is_contiguous(), "weight is ", shape(weight),
                   ", it must be [", p.k, "] and contiguous");
  const auto [rows, stride] = rows_of(x);
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < x.dim(); ++i) sizes.push_back(x.size(i));
  Tensor y = torch::stable::new_empty(x, sizes, p.y_dtype == p.dtype ? x.scalar_type() : ScalarType::Float);
  p.x = rows.const_data_ptr();
  p.x_stride = stride;
  p.weight = checked_data(weight, "weight");
  p.y = y.mutable_data_ptr();
  const Isa& isa = tilewright::isa();
  torch::stable::parallel_for(0, x.numel() / p.k, 1 + (int64_t(1) << 15) / p.k, [&](int64_t begin, int64_t end) {
    isa.rms_norm(&p, begin, end, scratch(Scratch::own, norm_bytes(p)));
  });
  return y;
}

}  // namespace
}  // namespace tilewright

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) { m.def("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) { m.impl("rms_norm", TORCH_BOX(&tilewright::rms_norm)); }
