#pragma once
// Activations: read once, rounded or quantized, and laid out in the order in which the products read them.
//
// Rows are packed in groups of `rows`. A row is cut into 4-byte units (one fp32, two bf16 or four int8); unit u of row
// r of a group with R rows lies at ((u / span) * R + r) * span + u % span, so a group is read from front to back.
#include "rows-inl.h"

namespace {

inline bool has_int8_activations(Kind kind) { return kind == Kind::int8 || kind == Kind::int4_int8; }

template <class I>
void load_row(const Gemm* p, int64_t row, float* out) {
  to_floats<I>(element(p->problem.x, p->problem.dtype, row * p->problem.x_stride), p->problem.dtype, p->problem.k, out);
}

// q = round_half_even(x * (127 / amax)), amax = max(|x|, 1e-7); returns amax / 127. A NaN in x makes the scale NaN.
inline float quantize_row(const float* x, int64_t k, int8_t* q, uint32_t flip) {
  uint32_t top = bits(1e-7f);  // magnitudes compare as their bits do, and NaN is above infinity
  for (int64_t i = 0; i < k; ++i) {
    const uint32_t magnitude = bits(x[i]) & 0x7fffffff;
    top = magnitude > top ? magnitude : top;
  }
  const float amax = from_bits(top), inverse = 127.0f / amax;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer that the low bits hold
  for (int64_t i = 0; i < k; ++i) q[i] = int8_t((bits(x[i] * inverse + kRound) ^ flip) & 0xff);
  return amax / 127.0f;
}

inline void place_row(const uint32_t* units, const Gemm* p, uint32_t* group, int64_t rows, int64_t row) {
  const int64_t span = p->plan.unit_span;
  uint32_t* out = group + row * span;
  if (span == 1)
    for (int64_t u = 0; u < p->plan.units; ++u) out[u * rows] = units[u];
  else if (span == 16)
    for (int64_t u = 0; u < p->plan.units; u += 16) memcpy(out + u * rows, units + u, 64);
  else
    for (int64_t u = 0; u < p->plan.units; u += span) memcpy(out + u * rows, units + u, size_t(span) * 4);
}

template <class I>
void prepare_row(const Gemm* p, int64_t row, float* values, void* units) {
  const int64_t k = p->problem.k;
  if (!I::kFloatUnits && !has_int8_activations(p->problem.kind) && p->problem.dtype == Float::bf16) {
    memcpy(units, static_cast<const uint16_t*>(p->problem.x) + row * p->problem.x_stride, size_t(k) * 2);
    return;
  }
  load_row<I>(p, row, values);
  if (!has_int8_activations(p->problem.kind)) {
    if constexpr (I::kFloatUnits) {
      float* out = static_cast<float*>(units);
      for (int64_t i = 0; i < k; ++i) out[i] = bf16_to_float(float_to_bf16(values[i]));
    } else {
      uint16_t* out = static_cast<uint16_t*>(units);
      for (int64_t i = 0; i < k; ++i) out[i] = float_to_bf16(values[i]);
    }
    return;
  }
  int8_t* q = static_cast<int8_t*>(units);
  const bool biased = I::kBiasedInt8 && p->problem.kind == Kind::int8;
  p->memory.row_scale[row] = quantize_row(values, k, q, biased ? 0x80 : 0);
  for (int64_t g = 0, groups = p->plan.sums_per_row; g < groups; ++g) {
    int32_t sum = 0;
    for (int64_t i = g * p->plan.k_group; i < smaller(k, (g + 1) * p->plan.k_group); ++i) sum += q[i];
    p->memory.row_sums[row * groups + g] = sum;
  }
}

// Packs the rows [begin, end).
template <class I>
void prepare(const Gemm* p, int64_t begin, int64_t end, void* scratch) {
  uint32_t* units = static_cast<uint32_t*>(scratch);
  float* values = reinterpret_cast<float*>(units + p->plan.units);
  memset(units, 0, size_t(p->plan.units) * 4);  // the padding beyond k stays zero
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row / p->plan.rows * p->plan.rows, rows = smaller(p->plan.rows, p->problem.m - first);
    prepare_row<I>(p, row, values, units);
    place_row(units, p, p->memory.activations + first * p->plan.units, rows, row - first);
  }
}

}  // namespace
