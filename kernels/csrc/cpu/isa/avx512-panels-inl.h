#pragma once
// Panels in the form of the bf16 pair products, [k/2][32][2], and of the byte products, [k/4][32][4].
#include <immintrin.h>

#include "linear-inl.h"

namespace {

struct Fp8Tables {
  alignas(64) uint8_t low[128], high[128];
};

constexpr Fp8Tables fp8_tables() {
  Fp8Tables t{};
  for (int code = 0; code < 128; ++code) {
    t.low[code] = uint8_t(fp8_to_bf16(uint8_t(code)));
    t.high[code] = uint8_t(fp8_to_bf16(uint8_t(code)) >> 8);
  }
  return t;
}

constexpr Fp8Tables kFp8 = fp8_tables();

// What 16-bit lanes look up with the lowest 5 of their bits, of which the highest is not part of an e2m1 code.
struct Mxfp4Table {
  alignas(64) uint16_t bf16[32], twice[32];  // the value, and twice the value as an integer
};
constexpr Mxfp4Table mxfp4_table() {
  constexpr uint16_t kMagnitude[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
  Mxfp4Table t{};
  for (int i = 0; i < 32; ++i) {
    t.bf16[i] = uint16_t(kMagnitude[i & 7] | (i & 8) << 12);
    t.twice[i] = uint16_t(int16_t(kTwiceE2m1[i & 15]));
  }
  return t;
}
constexpr Mxfp4Table kMxfp4 = mxfp4_table();

// kTiles: for AMX. Zero points are taken off the int4 codes here, not from the products, and mxfp4 becomes bf16.
template <bool kTiles>
struct Avx512Panels {
  static void scale_weights(Kind, Chunk&) {}

  // 64 e4m3fn codes, 32 columns of two k -> bf16 pairs of columns 0-15 and 16-31
  static void decode_fp8(__m512i codes, __m512i (&decoded)[2]) {
    const __m512i low0 = _mm512_load_si512(kFp8.low), low1 = _mm512_load_si512(kFp8.low + 64);
    const __m512i high0 = _mm512_load_si512(kFp8.high), high1 = _mm512_load_si512(kFp8.high + 64);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that unpacking leaves columns in order
    const __m512i x = _mm512_permutexvar_epi64(order, codes), sign = _mm512_set1_epi8(char(0x80));
    const __m512i low = _mm512_permutex2var_epi8(low0, x, low1);
    const __m512i high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high0, x, high1), x, sign, 0xf8);
    decoded[0] = _mm512_unpacklo_epi8(low, high);
    decoded[1] = _mm512_unpackhi_epi8(low, high);
  }

  // Codes of one quad of k: columns 0-15 and 16-31, four bytes each.
  static void nibbles(const uint8_t* from, __m512i (&codes)[2]) {
    const __m512i mask = _mm512_set1_epi8(0x0f), x = _mm512_loadu_si512(from);
    const __m512i low = _mm512_and_si512(x, mask), high = _mm512_and_si512(_mm512_srli_epi16(x, 4), mask);
    codes[0] = _mm512_shuffle_i64x2(low, high, 0x44);
    codes[1] = _mm512_shuffle_i64x2(low, high, 0xee);
  }

  // Codes 2 * pair and 2 * pair + 1 of every lane, less the zero point, as a bf16 pair (exact).
  static __m512i bf16_pairs(__m512i codes, int pair, __m512i zero) {
    const __m512i mask = _mm512_set1_epi32(15);
    const __m512i even = _mm512_and_si512(_mm512_srlv_epi32(codes, _mm512_set1_epi32(pair * 16)), mask);
    const __m512i odd = _mm512_and_si512(_mm512_srlv_epi32(codes, _mm512_set1_epi32(pair * 16 + 8)), mask);
    const __m512i low = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(even, zero)));
    const __m512i high = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(odd, zero)));
    return _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
  }

  // 8 k of 16 columns of mxfp4, two k in a lane: the I-th pair, from one of the tables.
  struct Mxfp4 {
    __m512i x;
    explicit Mxfp4(const uint8_t* codes) : x(_mm512_loadu_si512(codes)) {}
    template <int I>
    __m512i pair(const uint16_t* table = kMxfp4.twice) const {
      return _mm512_permutexvar_epi16(I ? _mm512_srli_epi16(x, 4 * I) : x, _mm512_load_si512(table));
    }
  };

  // Twice the values of a chunk as int16.
  static void mxfp4_words(const Chunk& c, uint8_t* out) {
    for (int64_t u = 0; u < c.columns / 8; ++u)
      for (int v = 0; v < 2; ++v) {
        const Mxfp4 source(c.weights + u / 8 * kMxfp4Bytes + kMxfp4Scales + u % 8 * 128 + v * 64);
        uint8_t* const to = out + u * 512 + v * 64;
        _mm512_storeu_si512(to, source.template pair<0>());
        _mm512_storeu_si512(to + 128, source.template pair<1>());
        _mm512_storeu_si512(to + 256, source.template pair<2>());
        _mm512_storeu_si512(to + 384, source.template pair<3>());
      }
  }

  // A group of columns of a block of mxfp4 as bf16: scales are added to the exponents of all codes but zeros.
  static void mxfp4_pairs(const uint8_t* block, const uint8_t* ahead, int group, uint8_t* out) {
    for (int line = 0; line < 9; ++line) _mm_prefetch(ahead + group * (kMxfp4Bytes / 2) + line * 64, _MM_HINT_T0);
    const uint8_t *const scales = block + group * kBlockN, *codes = block + kMxfp4Scales + group * 512;
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales));
    // Under scales outside of 2 .. 252 some code is no normal number of bf16.
    if (_mm256_cmpgt_epu8_mask(_mm256_sub_epi8(bytes, _mm256_set1_epi8(2)), _mm256_set1_epi8(char(250)))) [[unlikely]] {
      for (int64_t k = 0; k < kMxfp4Group; ++k)
        for (int64_t n = 0; n < kBlockN; ++n) {
          const uint16_t value = mxfp4_to_bf16(mxfp4_code(block, group * kMxfp4Group + k, n), scales[n]);
          memcpy(out + ((k / 2 * kBlockN + n) * 2 + k % 2) * 2, &value, 2);
        }
      return;
    }
    for (int v = 0; v < 2; ++v) {
      const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + v * 16)));
      const __m512i both = _mm512_or_si512(e, _mm512_slli_epi32(e, 16));
      const __m512i exponent = _mm512_slli_epi16(_mm512_sub_epi16(both, _mm512_set1_epi16(127)), 7);
      const auto scaled = [&](__m512i value) __attribute__((always_inline)) {
        const __mmask32 nonzero = _mm512_test_epi16_mask(value, _mm512_set1_epi16(0x7fff));
        return _mm512_mask_add_epi16(value, nonzero, value, exponent);
      };
      for (int u = 0; u < 4; ++u) {
        const Mxfp4 source(codes + u * 128 + v * 64);
        uint8_t* const to = out + u * 512 + v * 64;
        _mm512_storeu_si512(to, scaled(source.template pair<0>(kMxfp4.bf16)));
        _mm512_storeu_si512(to + 128, scaled(source.template pair<1>(kMxfp4.bf16)));
        _mm512_storeu_si512(to + 256, scaled(source.template pair<2>(kMxfp4.bf16)));
        _mm512_storeu_si512(to + 384, scaled(source.template pair<3>(kMxfp4.bf16)));
      }
    }
  }

  // Columns [k, k + columns) of a chunk of mxfp4.
  static void mxfp4(const Chunk& c, int64_t k, int64_t columns, uint8_t* out) {
    if constexpr (!kTiles) return mxfp4_words(c, out);
    for (int64_t end = k + columns; k < end; k += kMxfp4Group, out += kMxfp4Group * kBlockN * 2) {
      const int64_t at = k / kMxfp4Columns * kMxfp4Bytes;
      mxfp4_pairs(c.weights + at, c.ahead + at, int(k % kMxfp4Columns / kMxfp4Group), out);
    }
  }

  static __m512i load_zeros(const int8_t* z) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(z)));
  }

  template <class F>
  static F multiply_add(F a, F b, F c) {
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  }

  static __m512i plus_128(__m512i codes) { return _mm512_xor_si512(codes, _mm512_set1_epi8(char(0x80))); }

  static const uint8_t* panel(Kind kind, const Chunk& c, uint8_t* out) {
    if (kind == Kind::int8) {
      for (int64_t i = 0; i < c.columns * kBlockN; i += 64)
        _mm512_storeu_si512(out + i, plus_128(_mm512_loadu_si512(c.weights + i)));
      return out;
    }
    if (kind == Kind::mxfp4) {
      mxfp4(c, 0, c.columns, out);
      return out;
    }
    const int64_t bytes = kBlockN * (kind == Kind::int4_int8 ? 1 : 2);
    for (int64_t k = 0; k < c.columns; k += c.k_group)
      decode(kind, c, k, smaller(c.k_group, c.columns - k), out + k * bytes);
    return out;
  }

  // Columns [k, k + columns) of a chunk, all in one k_group.
  static void decode(Kind kind, const Chunk& c, int64_t k, int64_t columns, uint8_t* out) {
    if (kind == Kind::mxfp4) return mxfp4(c, k, columns, out);
    if (kind == Kind::fp8) {
      const uint8_t *from = c.weights + k * kBlockN, *ahead = c.ahead + k * kBlockN;
      __m512i v[2];
      for (int64_t p = 0; p < columns / 2; ++p) {
        _mm_prefetch(ahead + p * 64, _MM_HINT_T0);
        decode_fp8(_mm512_loadu_si512(from + p * 64), v);
        store(out, p, v[0], v[1]);
      }
      return;
    }
    const int64_t group = k / c.k_group, at = group * c.k_group_bytes + k % c.k_group * 16;
    const __m512i zero0 = load_zeros(c.zeros + group * kBlockN), zero1 = load_zeros(c.zeros + group * kBlockN + 16);
    if (kind == Kind::int4_int8)
      quads(c.weights + at, c.ahead + at, columns / 4, zero0, zero1, out);
    else
      pairs(c.weights + at, c.ahead + at, columns / 4, zero0, zero1, out);
  }

  template <int R, int kSpan>
  static void int4_products(const uint8_t* from, const uint8_t* ahead, int64_t units, const uint32_t* a,
                            __m512i (&low)[R], __m512i (&high)[R]) {
    const __m512i mask = _mm512_set1_epi8(0x0f);
    for (int64_t u = 0; u < units; u += kSpan, a += R * kSpan)
#pragma GCC unroll 2
      for (int i = 0; i < kSpan; ++i, from += 64, ahead += 64) {
        _mm_prefetch(ahead, _MM_HINT_T0);
        const __m512i x = _mm512_loadu_si512(from);
        const __m512i x0 = _mm512_and_si512(x, mask), x1 = _mm512_and_si512(_mm512_srli_epi16(x, 4), mask);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512i activation = _mm512_set1_epi32(int(a[r * kSpan + i]));
          low[r] = _mm512_dpbusd_epi32(low[r], x0, activation);
          high[r] = _mm512_dpbusd_epi32(high[r], x1, activation);
        }
      }
  }

  // sum += float(sum of a * (code - zero)) * scale for R rows, one k_group after the other. Units of a row come in runs
  // of `span`, the rows' runs side by side.
  template <int R>
  static void multiply_int4(const Chunk& c, const uint32_t* a, int64_t span, const RowTerms& rows) {
    for (int64_t f = 0; f < c.k_groups; ++f) {
      compact_scales(c, f);
      const int64_t at = f * c.k_group_bytes;
      const uint8_t *from = c.weights + at, *ahead = c.ahead + at;
      __m512i low[R], high[R];  // products of columns 0-7 and 16-23; of 8-15 and 24-31
      for (int r = 0; r < R; ++r) low[r] = high[r] = _mm512_setzero_si512();
      if (span == 16)
        int4_products<R, 16>(from, ahead, c.k_group / 4, a, low, high);
      else
        int4_products<R, 8>(from, ahead, c.k_group / 4, a, low, high);
      a += R * c.k_group / 4;
      for (int half = 0; half < 2; ++half) {
        const __m512i zero = load_zeros(c.zeros + f * kBlockN + half * 16);
        const __m512 scale = _mm512_loadu_ps(c.scale + f * kBlockN + half * 16);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          float* const s = static_cast<float*>(c.sum) + r * kBlockN + half * 16;
          const __m512i dot =
              half ? _mm512_shuffle_i64x2(low[r], high[r], 0xee) : _mm512_shuffle_i64x2(low[r], high[r], 0x44);
          const __m512i less = _mm512_mullo_epi32(zero, _mm512_set1_epi32(rows.sum(r, f)));
          const __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(dot, less));
          const __m512 old = c.first && f == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(s);
          if (rows.scales)
            _mm512_storeu_ps(s, _mm512_fmadd_ps(value, _mm512_mul_ps(scale, _mm512_set1_ps(rows.scale(r, f))), old));
          else
            _mm512_storeu_ps(s, _mm512_add_ps(old, _mm512_mul_ps(value, scale)));
        }
      }
    }
  }

  static void store(uint8_t* out, int64_t at, __m512i first, __m512i second) {
    _mm512_storeu_si512(out + at * 128, first);
    _mm512_storeu_si512(out + at * 128 + 64, second);
  }

  static void quads(const uint8_t* from, const uint8_t* ahead, int64_t count, __m512i zero0, __m512i zero1,
                    uint8_t* out) {
    const __m512i every_byte = _mm512_set1_epi32(0x01010101);
    zero0 = _mm512_mullo_epi32(_mm512_and_si512(zero0, _mm512_set1_epi32(0xff)), every_byte);
    zero1 = _mm512_mullo_epi32(_mm512_and_si512(zero1, _mm512_set1_epi32(0xff)), every_byte);
    for (int64_t q = 0; q < count; ++q) {
      __m512i v[2];
      _mm_prefetch(ahead + q * 64, _MM_HINT_T0);
      nibbles(from + q * 64, v);
      if constexpr (kTiles)
        store(out, q, _mm512_sub_epi8(v[0], zero0), _mm512_sub_epi8(v[1], zero1));
      else
        store(out, q, v[0], v[1]);
    }
  }

  static void pairs(const uint8_t* from, const uint8_t* ahead, int64_t count, __m512i zero0, __m512i zero1,
                    uint8_t* out) {
    for (int64_t q = 0; q < count; ++q) {
      __m512i v[2];
      _mm_prefetch(ahead + q * 64, _MM_HINT_T0);
      nibbles(from + q * 64, v);
      for (int i = 0; i < 2; ++i) store(out, 2 * q + i, bf16_pairs(v[0], i, zero0), bf16_pairs(v[1], i, zero1));
    }
  }

  static void halves_to_floats(const uint16_t* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 mask = count - i >= 16 ? 0xffff : __mmask16((1u << (count - i)) - 1);
      _mm512_mask_storeu_ps(to + i, mask, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from + i)));
    }
  }

  static void floats_to_halves(const float* from, uint16_t* to, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 mask = count - i >= 16 ? 0xffff : __mmask16((1u << (count - i)) - 1);
      const __m512 v = _mm512_maskz_loadu_ps(mask, from + i);
      _mm256_mask_storeu_epi16(to + i, mask, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }
};

}  // namespace
