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

template <class Form>
struct ScalarPanels {
  static const uint8_t* bf16_panel(const uint8_t* from, int64_t columns, uint8_t* panel) {
    for (int64_t i = 0; i < columns * kBlockN; ++i) {
      uint16_t value;
      memcpy(&value, from + 2 * i, 2);
      Form::put(panel, i / 64 * 2 + i % 2, i % 64 / 2, value);
    }
    return panel;
  }

  static const uint8_t* fp8_panel(const uint8_t* from, int64_t columns, uint8_t* panel) {
    for (int64_t i = 0; i < columns * kBlockN; ++i)
      Form::put(panel, i / 64 * 2 + i % 2, i % 64 / 2, fp8_to_bf16(from[i]));
    return panel;
  }

  static const uint8_t* int4_bf16_panel(const uint8_t* from, int64_t columns, const int8_t* zeros, uint8_t* panel) {
    for (int64_t k = 0; k < columns; ++k)
      for (int64_t n = 0; n < kBlockN; ++n)
        Form::put(panel, k, n, float_to_bf16(float(int4_code(from, k, n) - zeros[n])));
    return panel;
  }

  static const uint8_t* int8_panel(const uint8_t* from, int64_t, uint8_t*) { return from; }

  static const uint8_t* int4_panel(const uint8_t* from, int64_t columns, uint8_t* panel) {
    for (int64_t k = 0; k < columns; ++k)
      for (int64_t n = 0; n < kBlockN; ++n) panel[(k / 4 * kBlockN + n) * 4 + k % 4] = uint8_t(int4_code(from, k, n));
    return panel;
  }

  static void halves_to_floats(const uint16_t* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = half_to_float(from[i]);
  }

  static void floats_to_halves(const float* from, uint16_t* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = float_to_half(from[i]);
  }
};

}  // namespace
