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

struct Avx512Panels {
  static const uint8_t* bf16_panel(const uint8_t* from, int64_t, uint8_t*) { return from; }
  static const uint8_t* int8_panel(const uint8_t* from, int64_t, uint8_t*) { return from; }

  static const uint8_t* fp8_panel(const uint8_t* from, int64_t columns, uint8_t* panel) {
    const __m512i low0 = _mm512_load_si512(kFp8.low), low1 = _mm512_load_si512(kFp8.low + 64);
    const __m512i high0 = _mm512_load_si512(kFp8.high), high1 = _mm512_load_si512(kFp8.high + 64);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that unpacking leaves columns in order
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    for (int64_t p = 0; p < columns / 2; ++p) {
      const __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + p * 64));
      const __m512i low = _mm512_permutex2var_epi8(low0, x, low1);
      const __m512i high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high0, x, high1), x, sign, 0xf8);
      _mm512_storeu_si512(panel + p * 128, _mm512_unpacklo_epi8(low, high));
      _mm512_storeu_si512(panel + p * 128 + 64, _mm512_unpackhi_epi8(low, high));
    }
    return panel;
  }

  // Codes of one quad of k: columns 0-15 and 16-31, four bytes each.
  static void nibbles(const uint8_t* from, __m512i* first, __m512i* second) {
    const __m512i mask = _mm512_set1_epi8(0x0f), x = _mm512_loadu_si512(from);
    const __m512i low = _mm512_and_si512(x, mask), high = _mm512_and_si512(_mm512_srli_epi16(x, 4), mask);
    *first = _mm512_shuffle_i64x2(low, high, 0x44);
    *second = _mm512_shuffle_i64x2(low, high, 0xee);
  }

  static const uint8_t* int4_panel(const uint8_t* from, int64_t columns, uint8_t* panel) {
    for (int64_t q = 0; q < columns / 4; ++q) {
      __m512i first, second;
      nibbles(from + q * 64, &first, &second);
      _mm512_storeu_si512(panel + q * 128, first);
      _mm512_storeu_si512(panel + q * 128 + 64, second);
    }
    return panel;
  }

  // Two of the four codes in every lane, from bit `shift` on, less the zero point, as a bf16 pair (exact).
  static __m512i bf16_pairs(__m512i codes, int shift, __m512i zero) {
    const __m512i mask = _mm512_set1_epi32(15);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(codes, shift), mask);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(codes, shift + 8), mask);
    const __m512i low = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(even, zero)));
    const __m512i high = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(odd, zero)));
    return _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
  }

  static const uint8_t* int4_bf16_panel(const uint8_t* from, int64_t columns, const int8_t* zeros, uint8_t* panel) {
    const __m128i* z = reinterpret_cast<const __m128i*>(zeros);
    const __m512i zero0 = _mm512_cvtepi8_epi32(_mm_loadu_si128(z)),
                  zero1 = _mm512_cvtepi8_epi32(_mm_loadu_si128(z + 1));
    for (int64_t q = 0; q < columns / 4; ++q, panel += 256) {
      __m512i first, second;
      nibbles(from + q * 64, &first, &second);
      for (int pair = 0; pair < 2; ++pair) {
        _mm512_storeu_si512(panel + pair * 128, bf16_pairs(first, pair * 16, zero0));
        _mm512_storeu_si512(panel + pair * 128 + 64, bf16_pairs(second, pair * 16, zero1));
      }
    }
    return panel - columns * 64;
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
