// What the operators share: checks with messages, and conversions from torch's types.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
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

// Sizes above this are no layer of a model. Below it, products of two sizes and an element's bytes fit into 63 bits.
constexpr int64_t kMostSize = int64_t(1) << 30;

inline int64_t checked_size(int64_t size, const char* name) {
  TILEWRIGHT_CHECK(size >= 0 && size <= kMostSize, name, " is ", size, ", it must be 0 to ", kMostSize);
  return size;
}

// Product of sizes that no tensor vouches for, such as those of rows that lie at the same place.
inline int64_t checked_product(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (int64_t size : sizes)
    TILEWRIGHT_CHECK(!__builtin_mul_overflow(product, size, &product), "the sizes of a problem are too large");
  return product;
}

// The bytes from the first to behind the last element.
inline int64_t extent_bytes(const Tensor& t) {
  const auto sizes = t.sizes(), strides = t.strides();
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    last += (sizes[i] - 1) * strides[i];
  }
  return (last + 1) * int64_t(t.element_size());
}

// Before an operator reads a tensor: it must be on the CPU, and its storage, which can be freed or made smaller below
// the tensor, must hold all of its elements, of which the last ends after so many bytes.
inline void check_memory(const Tensor& t, const char* name, int64_t bytes) {
  TILEWRIGHT_CHECK(t.is_cpu(), name, " must be on the CPU");
  if (bytes == 0) return;
  int64_t storage = 0;
  TILEWRIGHT_CHECK(aoti_torch_get_storage_size(t.get(), &storage) == AOTI_TORCH_SUCCESS, name, " has no storage");
  if (t.storage_offset()) bytes += t.storage_offset() * int64_t(t.element_size());
  TILEWRIGHT_CHECK(bytes <= storage, name, " is ", shape(t), ", its storage of ", storage,
                   " bytes ends before its last element");
}

inline void check_memory(const Tensor& t, const char* name) { check_memory(t, name, extent_bytes(t)); }

inline const void* checked_data(const Tensor& t, const char* name) {
  check_memory(t, name);
  return t.const_data_ptr();
}

inline const void* contiguous_data(const Tensor& t, const char* name, ScalarType type, const char* type_name) {
  TILEWRIGHT_CHECK(t.scalar_type() == type && t.is_contiguous(), name, " must be a contiguous ", type_name, " tensor");
  check_memory(t, name, t.numel() * int64_t(t.element_size()));
  return t.const_data_ptr();
}

// The rows of x [..., k] and how many elements lie from one to the next: x itself, a copy where its strides say no.
inline std::pair<Tensor, int64_t> rows_of(const Tensor& x) {
  check_memory(x, "x");
  const int64_t k = x.size(-1);
  Tensor rows = x.dim() == 2 || x.is_contiguous() ? x : torch::stable::reshape(x, {x.numel() / k, k});
  if (rows.stride(-1) != 1 && k != 1) rows = torch::stable::contiguous(rows);
  const int64_t stride = rows.dim() == 2 ? rows.stride(0) : k;
  return {std::move(rows), stride};
}

// Inputs that a result must not overwrite while they are read. Null or empty ones are none.
using Inputs = std::initializer_list<const Tensor*>;
inline const Tensor* pointer(const std::optional<Tensor>& t) { return t ? &*t : nullptr; }

inline void check_apart(const Tensor& out, Inputs inputs) {
  const auto begin = reinterpret_cast<uintptr_t>(out.const_data_ptr()), end = begin + uintptr_t(extent_bytes(out));
  for (const Tensor* input : inputs) {
    if (!input) continue;
    const auto from = reinterpret_cast<uintptr_t>(input->const_data_ptr()), to = from + uintptr_t(extent_bytes(*input));
    TILEWRIGHT_CHECK(begin == end || from == to || end <= from || to <= begin, "out must not share memory with x, a ",
                     "weight, its scales or zero points, a bias or routing");
  }
}

// Columns that share a scale in compact int4, whose blocks have so many bytes; 0 if no block has.
inline int64_t compact_group(int64_t bytes) {
  for (int64_t group : {32, 64, 128})
    if (bytes == group * 16 + kCompactScales) return group;
  return 0;
}

// How activations of a problem are rounded to int8, once its kind, k and group are known.
inline void set_activations(GemmProblem& p, int64_t activation_group, int64_t rotation) {
  const bool integers = p.kind == Kind::int8 || p.kind == Kind::int4_int8;
  TILEWRIGHT_CHECK(activation_group == 0 || ((activation_group == 64 || activation_group == 128) && integers),
                   "activation_group is ", activation_group,
                   ", it must be 0 (one scale for each row), 64 or 128, and 0 where activations are not int8");
  const bool power = rotation > 1 && rotation <= 128 && (rotation & (rotation - 1)) == 0;
  TILEWRIGHT_CHECK(rotation == 0 || (power && p.k % rotation == 0), "rotation is ", rotation,
                   ", it must be 0 or a power of two from 2 to 128 that divides the ", p.k, " columns");
  TILEWRIGHT_CHECK(rotation == 0 || integers || p.kind == Kind::int4_bf16, "only int8 and int4 weights are rotated");
  p.activation_group = activation_group;
  p.rotation = rotation;
}

// The tensor of a result, x with `columns` in the place of its last size: new, or what the caller gave for it.
inline Tensor result(const Tensor& x, int64_t columns, const Tensor* out, Inputs inputs) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) sizes.push_back(x.size(i));
  sizes.push_back(columns);
  if (!out) return torch::stable::new_empty(x, sizes);
  bool fits = out->dim() == x.dim() && out->is_contiguous() && out->scalar_type() == x.scalar_type();
  for (int64_t i = 0; fits && i < x.dim(); ++i) fits = out->size(i) == sizes[size_t(i)];
  TILEWRIGHT_CHECK(fits, "out is ", shape(*out), ", it must be contiguous, of the dtype of x, and x is ", shape(x),
                   " and has ", columns, " columns in the result");
  check_memory(*out, "out");
  check_apart(*out, {&x});
  check_apart(*out, inputs);
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
