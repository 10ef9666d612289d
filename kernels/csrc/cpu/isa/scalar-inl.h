#pragma once
// Numbers one at a time: what every instruction set can fall back on. Included once per instruction set, see
// linear-inl.h.
#include <string.h>

#include "../table.h"

namespace {
using namespace tilewright;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline uint32_t bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}

inline float from_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

inline float bf16_to_float(uint16_t b) { return from_bits(uint32_t(b) << 16); }

// Round to nearest even; a NaN stays one. Branch-free, so that loops of it become vector code.
inline uint16_t float_to_bf16(float f) {
  const uint32_t u = bits(f), rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16 | 0x40) : rounded);
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // infinity, NaN
  if (magnitude < 0x400) return from_bits(sign | bits(float(magnitude) * 0x1p-24f));         // zero, subnormal
  return from_bits(sign | ((magnitude << 13) + (112u << 23)));
}

inline uint16_t float_to_half(float f) {
  const uint32_t u = bits(f), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 2^16 and above
  if (magnitude < 0x38800000) return uint16_t(sign | (bits(from_bits(magnitude) + 0.5f) - bits(0.5f)));  // subnormal
  const uint32_t rebiased = magnitude - (112u << 23);
  return uint16_t(sign | (rebiased + 0xfff + (rebiased >> 13 & 1)) >> 13);
}

// e4m3fn code -> bf16 bits, exact for all 256 codes (bf16 has the range and the precision; 0x7f and 0xff are NaN).
constexpr uint16_t fp8_to_bf16(uint8_t code) {
  constexpr uint16_t kSubnormal[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};  // i * 2^-9
  const int magnitude = code & 0x7f, sign = (code & 0x80) << 8;
  const int value = magnitude == 0x7f ? 0x7fc0 : magnitude < 8 ? kSubnormal[magnitude] : (magnitude << 4) + 0x3c00;
  return uint16_t(sign | value);
}

// Twice the values of e2m1 codes, and the power of two of an e8m0 byte: 2^(byte - 127), NaN for 255.
constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
inline float e8m0_to_float(uint8_t byte) {
  return from_bits(byte == 255 ? 0x7fc00000 : byte ? uint32_t(byte) << 23 : 0x00400000);
}

// bf16 of an e2m1 code times a scale, exact where bf16 has it; beyond its range infinite.
inline uint16_t mxfp4_to_bf16(int code, uint8_t scale) {
  const float value = float(kTwiceE2m1[code]) * 0.5f * e8m0_to_float(scale);
  return uint16_t(bits(value) >> 16 | (code == 8 && scale != 255 ? 0x8000 : 0));
}

// The code of column k and row n of a block of mxfp4, and its scale.
inline int mxfp4_code(const uint8_t* block, int64_t k, int64_t n) {
  return block[kMxfp4Scales + k / 8 * 128 + n * 4 + k % 2 * 2 + k % 8 / 4] >> (k % 4 / 2 * 4) & 15;
}
inline uint8_t mxfp4_scale(const uint8_t* block, int64_t k, int64_t n) { return block[k / kMxfp4Group * kBlockN + n]; }

}  // namespace
