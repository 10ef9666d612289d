#pragma once
// Panels decoded one weight at a time.
#include "linear-inl.h"

namespace {

// Pairs [k/2][32][2] of bf16, what the products of two bf16 read; Floats [k][32] of fp32.
struct Pairs {
  static void put(uint8_t* panel, int64_t k, int64_t column, uint16_t value) {
    memcpy(panel + ((k / 2 * kBlockN + column) * 2 + k % 2) * 2, &value, 2);
  }
};
struct Floats {
  static void put(uint8_t* panel, int64_t k, int64_t column, uint16_t value) {
    const float f = bf16_to_float(value);
    memcpy(panel + (k * kBlockN + column) * 4, &f, 4);
  }
};

// The 4-bit code of column n and k within a block [k/4][n/16][n%8][k%4], low nibble where n/8 is even.
inline int int4_code(const uint8_t* block, int64_t k, int64_t n) {
  return block[k / 4 * 64 + (n / 16 * 8 + n % 8) * 4 + k % 4] >> (n / 8 % 2 * 4) & 15;
}

// kSigned: zero points are taken off the int4 codes here, not from the products.
template <class Form, bool kSigned>
struct ScalarPanels {
  static void scale_weights(Kind, Chunk&) {}

  static const uint8_t* panel(Kind kind, const Chunk& c, uint8_t* out) {
    const int64_t int4_bytes = c.fold * 16 + 128;
    for (int64_t k = 0; k < c.columns; ++k)
      for (int64_t n = 0; n < kBlockN; ++n) {
        const int64_t element = (k / 2 * kBlockN + n) * 2 + k % 2, g = k / c.fold;
        if (kind == Kind::int4_int8 || kind == Kind::int4_bf16) {
          const int code = int4_code(c.weights + g * int4_bytes, k % c.fold, n), zero = c.zeros[g * kBlockN + n];
          if (kind == Kind::int4_int8)
            out[(k / 4 * kBlockN + n) * 4 + k % 4] = uint8_t(kSigned ? code - zero : code);
          else
            Form::put(out, k, n, float_to_bf16(float(code - zero)));
        } else if (kind == Kind::fp8) {
          Form::put(out, k, n, fp8_to_bf16(c.weights[element]));
        } else {
          uint16_t value;
          memcpy(&value, c.weights + 2 * element, 2);
          Form::put(out, k, n, value);
        }
      }
    return out;
  }

  static void halves_to_floats(const uint16_t* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = half_to_float(from[i]);
  }

  static void floats_to_halves(const float* from, uint16_t* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = float_to_half(from[i]);
  }
};

}  // namespace
