#pragma once
// 256-bit registers: AVX2, FMA and F16C; with TILEWRIGHT_AVXVNNI also the byte products of AVX-VNNI. bf16 products are
// made in fp32, the panels of the float kinds are fp32 [k][32].
#include <immintrin.h>

#include "vector-inl.h"

namespace {

struct Avx2Panels {
  // 8 columns of bf16 pairs -> the even and the odd k, as fp32
  static void split(__m256i pairs, float* even, float* odd) {
    _mm256_storeu_ps(even, _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
    _mm256_storeu_ps(odd, _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000)))));
  }

  static const uint8_t* bf16_panel(const uint8_t* from, int64_t columns, uint8_t* panel) {
    float* out = reinterpret_cast<float*>(panel);
    for (int64_t p = 0; p < columns / 2; ++p, from += 128, out += 2 * kBlockN)
      for (int v = 0; v < 4; ++v)
        split(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + v), out + v * 8, out + kBlockN + v * 8);
    return panel;
  }

  // 32 e4m3fn codes, 16 columns of two k -> bf16 pairs of columns 0-7 and 8-15
  static void decode_fp8(__m256i codes, __m256i* first, __m256i* second) {
    const __m256i low_nibble = _mm256_set1_epi8(0x0f);
    const __m256i x = _mm256_permute4x64_epi64(codes, 0xd8);  // so that the unpacking below leaves columns in order
    const __m256i exponent = _mm256_and_si256(_mm256_srli_epi16(x, 3), low_nibble);
    const __m256i fraction = _mm256_and_si256(x, _mm256_set1_epi8(7));
    // high byte (120 + exponent) / 2, low byte (exponent % 2) * 128 + fraction * 16; subnormals by table, i * 2^-9
    const __m256i subnormal = _mm256_cmpeq_epi8(exponent, _mm256_setzero_si256());
    __m256i high =
        _mm256_add_epi8(_mm256_and_si256(_mm256_srli_epi16(exponent, 1), low_nibble), _mm256_set1_epi8(0x3c));
    __m256i low = _mm256_and_si256(_mm256_slli_epi16(x, 4), _mm256_set1_epi8(char(0xf0)));
    high = _mm256_blendv_epi8(high, _mm256_shuffle_epi8(table(0x3c3c3c3c3b3b3b00), fraction), subnormal);
    low = _mm256_blendv_epi8(low, _mm256_shuffle_epi8(table(0x60402000c0800000), fraction), subnormal);
    const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi8(0x7f));
    const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi8(magnitude, _mm256_set1_epi8(0x7f)), _mm256_set1_epi8(0x7f));
    high = _mm256_or_si256(high, _mm256_or_si256(nan, _mm256_andnot_si256(_mm256_set1_epi8(0x7f), x)));
    *first = _mm256_unpacklo_epi8(low, high);
    *second = _mm256_unpackhi_epi8(low, high);
  }

  // Eight bytes for _mm256_shuffle_epi8, the first one lowest.
  static __m256i table(uint64_t bytes) { return _mm256_set1_epi64x(int64_t(bytes)); }

  static const uint8_t* fp8_panel(const uint8_t* from, int64_t columns, uint8_t* panel) {
    float* out = reinterpret_cast<float*>(panel);
    for (int64_t p = 0; p < columns / 2; ++p, from += 64, out += 2 * kBlockN)
      for (int half = 0; half < 2; ++half) {
        __m256i first, second;
        decode_fp8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half), &first, &second);
        split(first, out + half * 16, out + kBlockN + half * 16);
        split(second, out + half * 16 + 8, out + kBlockN + half * 16 + 8);
      }
    return panel;
  }

  // Codes of one quad of k: columns 0-7, 8-15, 16-23, 24-31, four bytes each.
  static void nibbles(const uint8_t* from, __m256i (&codes)[4]) {
    const __m256i mask = _mm256_set1_epi8(0x0f);
    for (int half = 0; half < 2; ++half) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + half);
      codes[2 * half] = _mm256_and_si256(x, mask);
      codes[2 * half + 1] = _mm256_and_si256(_mm256_srli_epi16(x, 4), mask);
    }
  }

  static const uint8_t* int4_bf16_panel(const uint8_t* from, int64_t columns, const int8_t* zeros, uint8_t* panel) {
    float* out = reinterpret_cast<float*>(panel);
    for (int64_t q = 0; q < columns / 4; ++q, from += 64, out += 4 * kBlockN) {
      __m256i codes[4];
      nibbles(from, codes);
      for (int v = 0; v < 4; ++v) {
        const __m256i zero = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros + v * 8)));
        for (int i = 0; i < 4; ++i) {
          const __m256i code = _mm256_and_si256(_mm256_srli_epi32(codes[v], 8 * i), _mm256_set1_epi32(15));
          _mm256_storeu_ps(out + i * kBlockN + v * 8, _mm256_cvtepi32_ps(_mm256_sub_epi32(code, zero)));
        }
      }
    }
    return panel;
  }

  static const uint8_t* int8_panel(const uint8_t* from, int64_t, uint8_t*) { return from; }

  static const uint8_t* int4_panel(const uint8_t* from, int64_t columns, uint8_t* panel) {
    for (int64_t q = 0; q < columns / 4; ++q) {
      __m256i codes[4];
      nibbles(from + q * 64, codes);
      for (int v = 0; v < 4; ++v) _mm256_storeu_si256(reinterpret_cast<__m256i*>(panel + q * 128) + v, codes[v]);
    }
    return panel;
  }

  static void halves_to_floats(const uint16_t* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    for (; i < count; ++i) to[i] = half_to_float(from[i]);
  }

  static void floats_to_halves(const float* from, uint16_t* to, int64_t count) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < count; ++i) to[i] = float_to_half(from[i]);
  }
};

struct Avx2 : Avx2Panels {
  using F = __m256;
  using N = __m256i;
  struct Pair {
    F even, odd;
  };
  using PairActivation = Pair;
  using Quad = __m256i;

  static constexpr int kLanes = 8, kFloatRows = 6, kIntRows = 4;  // x 2 vectors: 12 sums, 2 weights, 1 activation
  static constexpr bool kFloatUnits = true;
  static constexpr Blocking kBlocking{.bf16_chunk = 128, .int8_chunk = 2048, .task_rows = 96, .task_blocks = 8};
  static constexpr int vectors(int rows) { return rows <= 2 ? 4 : 2; }

  static F zero() { return _mm256_setzero_ps(); }
  static N zero_int() { return _mm256_setzero_si256(); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static N load_int(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store(float* p, F f) { _mm256_storeu_ps(p, f); }
  static void store_int(int32_t* p, N n) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), n); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F multiply(F a, F b) { return _mm256_mul_ps(a, b); }
  static N add_int(N a, N b) { return _mm256_add_epi32(a, b); }
  static N subtract(N a, N b) { return _mm256_sub_epi32(a, b); }
  static N multiply_int(N a, N b) { return _mm256_mullo_epi32(a, b); }
  static F to_float(N n) { return _mm256_cvtepi32_ps(n); }
  static N broadcast(uint32_t u) { return _mm256_set1_epi32(int(u)); }
  static N load_zeros(const int8_t* z) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(z)));
  }

  static Pair load_pair(const uint8_t* panel, int64_t pair, int vector) {
    const float* p = reinterpret_cast<const float*>(panel) + pair * 2 * kBlockN + vector * kLanes;
    return {load(p), load(p + kBlockN)};
  }
  template <int R>
  static Pair load_activation(const uint32_t* a, int64_t pair, int row) {
    const float* p = reinterpret_cast<const float*>(a) + pair * 2 * R + row;
    return {_mm256_broadcast_ss(p), _mm256_broadcast_ss(p + R)};
  }
  static F dot_pair(F acc, Pair w, Pair a) {
    return _mm256_fmadd_ps(w.odd, a.odd, _mm256_fmadd_ps(w.even, a.even, acc));
  }

  static Quad load_quad(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
#ifdef TILEWRIGHT_AVXVNNI
  static constexpr bool kBiasedInt8 = true;
  static N dot_s8(N acc, Quad w, N a) { return _mm256_dpbusd_avx_epi32(acc, a, w); }
  static N dot_u4(N acc, Quad w, N a) { return _mm256_dpbusd_avx_epi32(acc, w, a); }
#else
  static constexpr bool kBiasedInt8 = false;
  // |w| * sign(w) a: the pair sums stay within 2 * 128 * 127, where (a + 128) * w would saturate 16 bits.
  static N dot_s8(N acc, Quad w, N a) { return dot_u4(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(a, w)); }
  static N dot_u4(N acc, Quad w, N a) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1)));
  }
#endif
};

}  // namespace
