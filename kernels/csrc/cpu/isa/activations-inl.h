#pragma once
// Activations: read once, rounded or quantized, and laid out in the order in which the products read them.
//
// Rows are packed in groups of `rows`. A row is cut into 4-byte units (one fp32, two bf16 or four int8); unit u of row
// r of a group with R rows lies at ((u / span) * R + r) * span + u % span, so a group is read from front to back.
#include "rows-inl.h"

namespace {

inline bool has_int8_activations(Kind kind) { return kind == Kind::int8 || kind == Kind::int4_int8; }

// With mxfp4, vector registers multiply integers: bf16 activations become int16 with one power of two for 32 columns,
// which changes none of at least 1 / 128 of the largest of them. So the sums of a group are exact, and the same
// everywhere.
template <class I>
constexpr bool has_int16_activations(Kind kind) {
  return kind == Kind::mxfp4 && I::kInt16;
}

template <class I>
void load_row(const Gemm* p, int64_t row, float* out) {
  to_floats<I>(element(p->problem.x, p->problem.dtype, row * p->problem.x_stride), p->problem.dtype, p->problem.k, out);
}

// x H for each run of `block` columns: sums and differences of neighbours at distance 1, 2, 4 .., in this order, and
// then a factor. Vectors are spelled out for distances within one of them; all orders are those of
// kernels/python/rotation.py.
inline void rotate(float* x, int64_t k, int64_t block) {
  typedef float Eight __attribute__((vector_size(32)));
  typedef int32_t Lanes __attribute__((vector_size(32)));
  const auto step = [](Eight v, Lanes partner, Eight sign) { return __builtin_shuffle(v, partner) + v * sign; };
  if (block >= 8) {
    for (int64_t i = 0; i < k; i += 8) {
      Eight v;
      memcpy(&v, x + i, sizeof v);
      v = step(v, Lanes{1, 0, 3, 2, 5, 4, 7, 6}, Eight{1, -1, 1, -1, 1, -1, 1, -1});
      v = step(v, Lanes{2, 3, 0, 1, 6, 7, 4, 5}, Eight{1, 1, -1, -1, 1, 1, -1, -1});
      v = step(v, Lanes{4, 5, 6, 7, 0, 1, 2, 3}, Eight{1, 1, 1, 1, -1, -1, -1, -1});
      memcpy(x + i, &v, sizeof v);
    }
  }
  for (int64_t h = block >= 8 ? 8 : 1; h < block; h *= 2)
    for (int64_t i = 0; i < k; i += 2 * h)
      for (int64_t j = i; j < i + h; ++j) {
        const float low = x[j], high = x[j + h];
        x[j] = low + high;
        x[j + h] = low - high;
      }
  constexpr float kRoot[] = {1.0f, 0.707106781f};  // of 1 and 1 / 2
  const int log2 = __builtin_ctzll(uint64_t(block));
  const float factor = kRoot[log2 % 2] / float(int64_t(1) << (log2 / 2));
  for (int64_t i = 0; i < k; ++i) x[i] *= factor;
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

// q = round_half_even(x * 2^(14 - e)) of bf16 numbers, of which 2^e is the power of two below the largest; returns
// 2^(e - 15), as weights are stored as twice their values. A NaN or an infinity in x makes it NaN. Activations below
// 2^-100 lose digits, so that no power of two leaves the range of fp32.
inline float quantize_words(const float* x, int64_t k, int16_t* q) {
  uint32_t top = 0;
  for (int64_t i = 0; i < k; ++i) {
    const uint32_t magnitude = uint32_t(float_to_bf16(x[i]) & 0x7fff);
    top = magnitude > top ? magnitude : top;
  }
  const uint32_t exponent = top >> 7 < 27 ? 27 : top >> 7;  // biased; 27 is 2^-100
  const float factor = from_bits((127 + 14 + 127 - exponent) << 23);
  constexpr float kRound = 12582912.0f;
  for (int64_t i = 0; i < k; ++i) q[i] = int16_t(bits(bf16_to_float(float_to_bf16(x[i])) * factor + kRound) & 0xffff);
  return exponent == 255 ? __builtin_nanf("") : from_bits((exponent - 15) << 23);
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
  if (!I::kFloatUnits && !has_int8_activations(p->problem.kind) && !has_int16_activations<I>(p->problem.kind) &&
      p->problem.dtype == Float::bf16 && !p->problem.rotation) {
    memcpy(units, static_cast<const uint16_t*>(p->problem.x) + row * p->problem.x_stride, size_t(k) * 2);
    return;
  }
  load_row<I>(p, row, values);
  if (p->problem.rotation) rotate(values, k, p->problem.rotation);
  if (has_int16_activations<I>(p->problem.kind)) {
    int16_t* const q = static_cast<int16_t*>(units);
    float* const scales = p->memory.row_scale + row * p->plan.scales_per_row;
    for (int64_t g = 0; g < p->plan.scales_per_row; ++g) {
      const int64_t first = g * kMxfp4Group;
      scales[g] = quantize_words(values + first, larger(0, smaller(kMxfp4Group, k - first)), q + first);
    }
    return;
  }
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
  const uint32_t flip = I::kBiasedInt8 && p->problem.kind == Kind::int8 && !p->problem.activation_group ? 0x80 : 0;
  const int64_t scales = p->plan.scales_per_row, columns = scales > 1 ? p->plan.k_group << p->plan.scale_shift : k;
  for (int64_t s = 0; s < scales; ++s) {
    const int64_t first = s * columns;
    p->memory.row_scale[row * scales + s] = quantize_row(values + first, smaller(columns, k - first), q + first, flip);
  }
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
