#pragma once
// Norms of rows by their root mean square. Sums are made in 32 parts, column i in part i % 32, which are then added in
// halves, so that every instruction set gives the same bits; reference.py states the same steps.
#include "../norm.h"
#include "scalar-inl.h"

namespace {

template <class I>
void to_floats(const void* from, Float dtype, int64_t count, float* to) {
  const uint16_t* const bits16 = static_cast<const uint16_t*>(from);
  if (dtype == Float::f32)
    memcpy(to, from, size_t(count) * 4);
  else if (dtype == Float::f16)
    I::halves_to_floats(bits16, to, count);
  else
    for (int64_t i = 0; i < count; ++i) to[i] = bf16_to_float(bits16[i]);
}

template <class I>
void from_floats(const float* from, Float dtype, int64_t count, void* to) {
  uint16_t* const bits16 = static_cast<uint16_t*>(to);
  if (dtype == Float::f32)
    memcpy(to, from, size_t(count) * 4);
  else if (dtype == Float::f16)
    I::floats_to_halves(from, bits16, count);
  else
    for (int64_t i = 0; i < count; ++i) bits16[i] = float_to_bf16(from[i]);
}

inline float sum_of_squares(const float* x, int64_t k) {
  float sums[kBlockN] = {};
  const int64_t whole = k / kBlockN * kBlockN;
  for (int64_t at = 0; at < whole; at += kBlockN)
    for (int i = 0; i < kBlockN; ++i) sums[i] += x[at + i] * x[at + i];
  for (int64_t i = 0; i < k - whole; ++i) sums[i] += x[whole + i] * x[whole + i];
  for (int half = kBlockN / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

// Rows [begin, end).
template <class I>
void rms_norm(const Norm* p, int64_t begin, int64_t end, void* scratch) {
  const int64_t k = p->k, x_size = p->dtype == Float::f32 ? 4 : 2, y_size = p->y_dtype == Float::f32 ? 4 : 2;
  float* const values = static_cast<float*>(scratch);
  float* const weight = values + k;
  void* const rounded = weight + k;
  to_floats<I>(p->weight, p->weight_dtype, k, weight);
  for (int64_t row = begin; row < end; ++row) {
    to_floats<I>(static_cast<const uint8_t*>(p->x) + row * p->x_stride * x_size, p->dtype, k, values);
    const float scale = 1.0f / __builtin_sqrtf(sum_of_squares(values, k) / float(k) + p->epsilon);
    for (int64_t i = 0; i < k; ++i) values[i] *= scale;
    if (p->dtype != Float::f32) {
      from_floats<I>(values, p->dtype, k, rounded);
      to_floats<I>(rounded, p->dtype, k, values);
    }
    for (int64_t i = 0; i < k; ++i) values[i] *= weight[i];
    from_floats<I>(values, p->y_dtype, k, static_cast<uint8_t*>(p->y) + row * k * y_size);
  }
}

}  // namespace
