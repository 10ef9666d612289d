#pragma once
// 256-bit registers: AVX2, FMA and F16C; with TILEWRIGHT_AVXVNNI also the byte products of AVX-VNNI. bf16 products are
// made in fp32, the panels of the float kinds are fp32 [k][32].
#include <immintrin.h>

#include "vector-inl.h"

namespace {

struct Avx2 {
  using F = __m256;
  using N = __m256i;
  struct Pair {
    F even, odd;
  };
  using PairActivation = Pair;
  using Quad = __m256i;

  static constexpr int kLanes = 8, kFloatRows = 6, kIntRows = 4;  // x 2 vectors: 12 sums, 2 weights, 1 activation
  static constexpr bool kFloatUnits = true, kDecodes = true;
  static constexpr Blocking kBlocking{.bf16_chunk = 128,
                                      .int8_chunk = 2048,
                                      .streaming_bytes = 1 << 18,
                                      .task_rows = 96,
                                      .task_blocks = 8,
                                      .weights_ahead = 0,
                                      .l1_k_bytes = 0,
                                      .n_blocks_per_pass = 1};
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
  static F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F broadcast_float(float f) { return _mm256_set1_ps(f); }
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
  static N dot_s16(N acc, N w, N a) { return _mm256_dpwssd_avx_epi32(acc, w, a); }
  static constexpr bool kBiasedInt8 = true;
  static N dot_s8(N acc, Quad w, N a) { return _mm256_dpbusd_avx_epi32(acc, a, w); }
  static N dot_u4(N acc, Quad w, N a) { return _mm256_dpbusd_avx_epi32(acc, w, a); }
#else
  static N dot_s16(N acc, N w, N a) { return _mm256_add_epi32(acc, _mm256_madd_epi16(w, a)); }
  static constexpr bool kBiasedInt8 = false;
  // |w| * sign(w) a: the pair sums stay within 2 * 128 * 127, where (a + 128) * w would saturate 16 bits.
  static N dot_s8(N acc, Quad w, N a) { return dot_u4(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(a, w)); }
  static N dot_u4(N acc, Quad w, N a) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1)));
  }
#endif

  // 8 columns of bf16 pairs
  static Pair split(__m256i pairs) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))))};
  }

  template <int S>
  struct Bf16Pairs {
    const uint8_t* weights;
    Bf16Pairs(const Chunk& c, int first) : weights(c.weights + first * 32) {}
    void load(int64_t pair, Pair (&w)[S]) const {
      for (int v = 0; v < S; ++v) w[v] = split(load_quad(weights + pair * 128 + v * 32));
    }
    void finish() const {}
  };

  // An e4m3fn code shifted to the fields of fp16 is its value * 2^-8 (scale_weights makes up for that), subnormals too.
  // NaN is not: a column that has one gets a NaN for its scale.
  template <int S>
  struct Fp8Pairs {
    const uint8_t* weights;
    float* scale;
    __m256i top[S / 2];
    Fp8Pairs(const Chunk& c, int first) : weights(c.weights + first * 16), scale(c.scale + first * 8), top{} {}
    void load(int64_t pair, Pair (&w)[S]) {
      for (int v = 0; v < S; v += 2) {
        const __m256i x = load_quad(weights + pair * 64 + v * 16);  // 16 columns of two k
        top[v / 2] = _mm256_max_epu8(top[v / 2], _mm256_and_si256(x, _mm256_set1_epi8(0x7f)));
        const __m256i even = half(_mm256_slli_epi16(x, 8)), odd = half(x);
        w[v] = {_mm256_cvtph_ps(_mm256_castsi256_si128(even)), _mm256_cvtph_ps(_mm256_castsi256_si128(odd))};
        w[v + 1] = {_mm256_cvtph_ps(_mm256_extracti128_si256(even, 1)),
                    _mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1))};
      }
    }
    // sign and magnitude of the upper byte -> sign, one zero, magnitude, zeros
    static __m256i half(__m256i x) {
      return _mm256_and_si256(_mm256_srai_epi16(x, 1), _mm256_set1_epi16(short(0xbf80)));
    }
    void finish() const {
      for (int v = 0; v < S; v += 2) {
        const uint32_t nan = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(top[v / 2], _mm256_set1_epi8(0x7f))));
        for (int i = 0; nan && i < 16; ++i)
          if (nan >> (2 * i) & 3) scale[v * 8 + i] = __builtin_nanf("");
      }
    }
  };

  // 8 columns of four codes from `bytes` on (16 columns are 32 bytes, the later 8 in the high nibbles)
  static __m256i codes(const uint8_t* bytes, bool high) {
    const __m256i x = load_quad(bytes);
    return _mm256_and_si256(high ? _mm256_srli_epi16(x, 4) : x, _mm256_set1_epi8(0x0f));
  }

  template <int S>
  struct Int4Quads {
    const uint8_t* weights;
    Int4Quads(const Chunk& c, int first) : weights(c.weights + first * 16) {}
    void load(int64_t quad, Quad (&w)[S]) const {
      for (int v = 0; v < S; ++v) w[v] = codes(weights + quad * 64 + v / 2 * 32, v % 2);
    }
  };

  template <int S>
  struct UnsignedQuads {
    const uint8_t* weights;
    UnsignedQuads(const Chunk& c, int first) : weights(c.weights + first * 32) {}
    void load(int64_t quad, Quad (&w)[S]) const {
      for (int v = 0; v < S; ++v)
        w[v] = _mm256_xor_si256(load_quad(weights + quad * 128 + v * 32), _mm256_set1_epi8(char(0x80)));
    }
  };

  template <int S>
  struct Int4Pairs {
    const uint8_t* weights;
    __m256i zero[S];
    Int4Pairs(const Chunk& c, int first) : weights(c.weights + first * 16) {
      for (int v = 0; v < S; ++v) zero[v] = load_zeros(c.zeros + (first + v) * 8);
    }
    void load(int64_t pair, Pair (&w)[S]) const {
      const __m128i shift = _mm_cvtsi32_si128(int(pair % 2) * 16);
      for (int v = 0; v < S; ++v) {
        const __m256i x = _mm256_srl_epi32(codes(weights + pair / 2 * 64 + v / 2 * 32, v % 2), shift);
        const __m256i even = _mm256_and_si256(x, _mm256_set1_epi32(15));
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 8), _mm256_set1_epi32(15));
        w[v] = {to_float(_mm256_sub_epi32(even, zero[v])), to_float(_mm256_sub_epi32(odd, zero[v]))};
      }
    }
    void finish() const {}
  };

  // 8 k of 8 columns of mxfp4, two k in a lane: a table gives twice the values as bytes, which become int16.
  struct Mxfp4 {
    __m256i low, high;
    explicit Mxfp4(const uint8_t* codes) {
      const __m256i x = load_quad(codes), mask = _mm256_set1_epi8(0x0f);
      const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kTwiceE2m1)));
      low = _mm256_shuffle_epi8(table, _mm256_and_si256(x, mask));
      high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(x, 4), mask));
    }
    template <int I>
    __m256i pair() const {
      const __m256i values = I % 2 ? high : low;
      return _mm256_srai_epi16(I < 2 ? _mm256_slli_epi16(values, 8) : values, 8);
    }
  };

  static void mxfp4_words(const Chunk& c, uint8_t* out) {
    for (int64_t u = 0; u < c.columns / 8; ++u)
      for (int v = 0; v < 4; ++v) {
        const Mxfp4 source(c.weights + u / 8 * kMxfp4Bytes + kMxfp4Scales + u % 8 * 128 + v * 32);
        int32_t* const to = reinterpret_cast<int32_t*>(out + u * 512 + v * 32);
        store_int(to, source.template pair<0>());
        store_int(to + kBlockN, source.template pair<1>());
        store_int(to + 2 * kBlockN, source.template pair<2>());
        store_int(to + 3 * kBlockN, source.template pair<3>());
      }
  }

  static void scale_weights(Kind kind, Chunk& c) {
    if (kind == Kind::fp8)
      for (int64_t i = 0; i < c.k_groups * kBlockN; ++i) c.scale[i] *= 256;
  }

  template <template <int> class Source>
  static void decode_pairs(const Chunk& c, uint8_t* out) {
    Source<4> source(c, 0);
    float* at = reinterpret_cast<float*>(out);
    for (int64_t p = 0; p < c.columns / 2; ++p, at += 2 * kBlockN) {
      Pair w[4];
      source.load(p, w);
      for (int v = 0; v < 4; ++v) {
        store(at + v * kLanes, w[v].even);
        store(at + kBlockN + v * kLanes, w[v].odd);
      }
    }
    source.finish();
  }

  template <template <int> class Source>
  static void decode_quads(const Chunk& c, uint8_t* out) {
    const Source<4> source(c, 0);
    for (int64_t q = 0; q < c.columns / 4; ++q) {
      Quad w[4];
      source.load(q, w);
      for (int v = 0; v < 4; ++v) store_int(reinterpret_cast<int32_t*>(out + q * 128) + v * kLanes, w[v]);
    }
  }

  static const uint8_t* panel(Kind kind, const Chunk& chunk, uint8_t* out) {
    if (kind == Kind::mxfp4) {
      mxfp4_words(chunk, out);
      return out;
    }
    for (int64_t f = 0; f < chunk.k_groups; ++f) {
      const Chunk c = k_group_of(chunk, f);
      uint8_t* const to = out + f * chunk.k_group_panel;
      if (kind == Kind::bf16)
        decode_pairs<Bf16Pairs>(c, to);
      else if (kind == Kind::fp8)
        decode_pairs<Fp8Pairs>(c, to);
      else if (kind == Kind::int4_bf16)
        decode_pairs<Int4Pairs>(c, to);
      else if (kind == Kind::int4_int8)
        decode_quads<Int4Quads>(c, to);
      else
        decode_quads<UnsignedQuads>(c, to);
    }
    return out;
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

}  // namespace
