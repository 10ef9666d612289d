#pragma once
// Rows of numbers: to fp32 and back, and sums of products that are the same bits on every instruction set.
#include "scalar-inl.h"

namespace {

// Element `at` of numbers in fp32, bf16 or fp16.
inline const void* element(const void* data, Float dtype, int64_t at) {
  return static_cast<const uint8_t*>(data) + at * (dtype == Float::f32 ? 4 : 2);
}
inline void* element(void* data, Float dtype, int64_t at) {
  return static_cast<uint8_t*>(data) + at * (dtype == Float::f32 ? 4 : 2);
}

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

// Sum of a[i] * b[i] in 32 parts, product i in part i % 32, which are then added in halves. Vectors are spelled out:
// left to itself, the compiler adds the parts one at a time.
inline float dot(const float* a, const float* b, int64_t count) {
  typedef float Eight __attribute__((vector_size(32)));
  Eight sums[kBlockN / 8] = {}, x, y;
  const int64_t whole = count / kBlockN * kBlockN;
  for (int64_t at = 0; at < whole; at += kBlockN)
    for (int i = 0; i < kBlockN / 8; ++i) {
      memcpy(&x, a + at + i * 8, sizeof x);
      memcpy(&y, b + at + i * 8, sizeof y);
      sums[i] += x * y;
    }
  if (whole < count) {
    float parts[kBlockN];
    memcpy(parts, sums, sizeof parts);
    for (int64_t i = 0; i < count - whole; ++i) parts[i] += a[whole + i] * b[whole + i];
    memcpy(sums, parts, sizeof parts);
  }
  const Eight s = (sums[0] + sums[2]) + (sums[1] + sums[3]);
  return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

}  // namespace
