// What the operators share: checks with messages, and conversions from torch's types.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>

#include "check.h"
#include "cpu/table.h"

namespace tilewright {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

inline std::string shape(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

inline Float float_type(const Tensor& x, const char* name = "x") {
  const ScalarType type = x.scalar_type();
  TILEWRIGHT_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half, name,
                   " must be float32, bfloat16 or float16");
  return type == ScalarType::Float ? Float::f32 : type == ScalarType::BFloat16 ? Float::bf16 : Float::f16;
}

inline void check_contiguous(const Tensor& t, const char* name, ScalarType type, const char* type_name) {
  TILEWRIGHT_CHECK(t.scalar_type() == type && t.is_contiguous(), name, " must be a contiguous ", type_name, " tensor");
}

}  // namespace tilewright
