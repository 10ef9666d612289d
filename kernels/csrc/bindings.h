// What the operators share: checks with messages, and conversions from torch's types.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

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

// The rows of x [..., k] and how many elements lie from one to the next: x itself, a copy where its strides say no.
inline std::pair<Tensor, int64_t> rows_of(const Tensor& x) {
  const int64_t k = x.size(-1);
  Tensor rows = x.dim() == 2 || x.is_contiguous() ? x : torch::stable::reshape(x, {x.numel() / k, k});
  if (rows.stride(-1) != 1 && k != 1) rows = torch::stable::contiguous(rows);
  const int64_t stride = rows.dim() == 2 ? rows.stride(0) : k;
  return {std::move(rows), stride};
}

// The addresses from the first to behind the last element.
inline std::pair<uintptr_t, uintptr_t> extent(const Tensor& t) {
  const int64_t size = float_type(t, "out") == Float::f32 ? 4 : 2;
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  return {begin, t.numel() ? begin + uintptr_t((last + 1) * size) : begin};
}

// The tensor of a result, x with `columns` in the place of its last size: new, or what the caller gave for it.
inline Tensor result(const Tensor& x, int64_t columns, const Tensor* out) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) sizes.push_back(x.size(i));
  sizes.push_back(columns);
  if (!out) return torch::stable::new_empty(x, sizes);
  bool fits = out->dim() == x.dim() && out->is_contiguous() && out->scalar_type() == x.scalar_type();
  for (int64_t i = 0; fits && i < x.dim(); ++i) fits = out->size(i) == sizes[size_t(i)];
  TILEWRIGHT_CHECK(fits, "out is ", shape(*out), ", it must be contiguous, of the dtype of x, and x is ", shape(x),
                   " and has ", columns, " columns in the result");
  const auto [begin, end] = extent(*out);
  const auto [x_begin, x_end] = extent(x);
  TILEWRIGHT_CHECK(end <= x_begin || x_end <= begin, "out must not share memory with x");
  return *out;
}

// Two overloads of an operator that writes into `out`, or into a new tensor where that is null.
template <auto kCompute>
struct Op;
template <class... A, Tensor (*kCompute)(const Tensor*, A...)>
struct Op<kCompute> {
  static Tensor fresh(A... a) { return kCompute(nullptr, static_cast<A&&>(a)...); }
  static void into(A... a, const Tensor& out) { kCompute(&out, static_cast<A&&>(a)...); }
};

}  // namespace tilewright
