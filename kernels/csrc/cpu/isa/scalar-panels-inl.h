#pragma once
// Panels decoded one weight at a time.
#include "linear-inl.h"

namespace {

// Pairs [k/2][32][2] of bf16, what the products of two bf16 read; Floats [k][32] of fp32.
struct Pairs {
  static constexpr bool kTiles = true;  // they belong to AMX
  static void put(uint8_t* panel, int64_t k, int64_t column, uint16_t value) {
    memcpy(panel + ((k / 2 * kBlockN + column) * 2 + k % 2) * 2, &value, 2);
  }
};
struct Floats {
  static constexpr bool kTiles = false;
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
    for (int64_t k = 0; k < c.columns; ++k) decode_column(kind, c, k, k, out);
    return out;
  }

  // Columns [k, k + columns) of a chunk.
  static void decode(Kind kind, const Chunk& c, int64_t k, int64_t columns, uint8_t* out) {
    for (int64_t i = 0; i < columns; ++i) decode_column(kind, c, k + i, i, out);
  }

  static void decode_column(Kind kind, const Chunk& c, int64_t k, int64_t to, uint8_t* out) {
    const int64_t g = k / c.k_group;
    for (int64_t n = 0; n < kBlockN; ++n) {
      const int64_t element = (k / 2 * kBlockN + n) * 2 + k % 2;
      if (kind == Kind::int4_int8 || kind == Kind::int4_bf16) {
        const int code = int4_code(c.weights + g * c.k_group_bytes, k % c.k_group, n), zero = c.zeros[g * kBlockN + n];
        if (kind == Kind::int4_int8)
          out[(to / 4 * kBlockN + n) * 4 + to % 4] = uint8_t(kSigned ? code - zero : code);
        else
          Form::put(out, to, n, float_to_bf16(float(code - zero)));
      } else if (kind == Kind::mxfp4) {
        const uint8_t* const block = c.weights + k / kMxfp4Columns * kMxfp4Bytes;
        const int64_t at = k % kMxfp4Columns;
        const int code = mxfp4_code(block, at, n);
        const int16_t twice = kTwiceE2m1[code];
        if constexpr (Form::kTiles)
          Form::put(out, to, n, mxfp4_to_bf16(code, mxfp4_scale(block, at, n)));
        else
          memcpy(out + ((to / 2 * kBlockN + n) * 2 + to % 2) * 2, &twice, 2);
      } else if (kind == Kind::fp8) {
        Form::put(out, to, n, fp8_to_bf16(c.weights[element]));
      } else {
        uint16_t value;
        memcpy(&value, c.weights + 2 * element, 2);
        Form::put(out, to, n, value);
      }
    }
  }

  // sum += float(sum of a * (code - zero)) * scale for R rows, one k_group after the other. Units of a row come in runs
  // of `span`, the rows' runs side by side.
  template <int R>
  static void multiply_int4(const Chunk& c, const uint32_t* a, int64_t span, const RowTerms& rows) {
    for (int64_t f = 0; f < c.k_groups; ++f, a += R * c.k_group / 4) {
      compact_scales(c, f);
      for (int r = 0; r < R; ++r)
        for (int64_t n = 0; n < kBlockN; ++n) {
          int32_t dot = -c.zeros[f * kBlockN + n] * rows.sum(r, f);
          for (int64_t k = 0; k < c.k_group; ++k) {
            const int64_t u = k / 4;
            const uint32_t unit = a[(u / span * R + r) * span + u % span];
            dot += int4_code(c.weights + f * c.k_group_bytes, k, n) * int8_t(unit >> (k % 4 * 8));
          }
          float* const s = static_cast<float*>(c.sum) + r * kBlockN + n;
          const float old = c.first && f == 0 ? 0.0f : *s, scale = c.scale[f * kBlockN + n];
          *s = rows.scales ? __builtin_fmaf(float(dot), scale * rows.scale(r, f), old) : old + float(dot) * scale;
        }
    }
  }

  template <class F>
  static F multiply_add(F a, F b, F c) {
    for (size_t i = 0; i < sizeof(F) / 4; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
  }

  static void halves_to_floats(const uint16_t* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = half_to_float(from[i]);
  }

  static void floats_to_halves(const float* from, uint16_t* to, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = float_to_half(from[i]);
  }
};

}  // namespace
