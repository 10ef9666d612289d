// 512-bit registers: AVX-512 with VNNI, BF16 and VBMI.
#include "avx512-panels-inl.h"
#include "table-inl.h"
#include "vector-inl.h"

namespace {

struct Avx512 : Avx512Panels<false> {
  using F = __m512;
  using N = __m512i;
  using Pair = __m512i;
  using PairActivation = __m512i;
  using Quad = __m512i;

  static constexpr int kLanes = 16, kFloatRows = 8, kIntRows = 8;  // x 2 vectors: 16 sums, 2 weights, activations
  static constexpr bool kFloatUnits = false, kBiasedInt8 = true, kDecodes = true;
  static constexpr Blocking kBlocking{.bf16_chunk = 512,
                                      .int8_chunk = 1024,
                                      .streaming_bytes = 1 << 19,
                                      .task_rows = 192,
                                      .task_blocks = 8,
                                      .weights_ahead = 0,
                                      .l1_k_bytes = 0,
                                      .n_blocks_per_pass = 1};
  static constexpr int vectors(int) { return 2; }

  static F zero() { return _mm512_setzero_ps(); }
  static N zero_int() { return _mm512_setzero_si512(); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static N load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void store(float* p, F f) { _mm512_storeu_ps(p, f); }
  static void store_int(int32_t* p, N n) { _mm512_storeu_si512(p, n); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F multiply(F a, F b) { return _mm512_mul_ps(a, b); }
  static N add_int(N a, N b) { return _mm512_add_epi32(a, b); }
  static N subtract(N a, N b) { return _mm512_sub_epi32(a, b); }
  static N multiply_int(N a, N b) { return _mm512_mullo_epi32(a, b); }
  static F to_float(N n) { return _mm512_cvtepi32_ps(n); }
  static F broadcast_float(float f) { return _mm512_set1_ps(f); }
  static N broadcast(uint32_t u) { return _mm512_set1_epi32(int(u)); }
  static Pair load_pair(const uint8_t* panel, int64_t pair, int vector) {
    return _mm512_loadu_si512(panel + pair * 128 + vector * 64);
  }
  template <int R>
  static __m512i load_activation(const uint32_t* a, int64_t pair, int row) {
    return broadcast(a[pair * R + row]);
  }
  static F dot_pair(F acc, Pair w, __m512i a) { return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)a); }

  static Quad load_quad(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static N dot_s8(N acc, Quad w, N a) { return _mm512_dpbusd_epi32(acc, a, w); }
  static N dot_u4(N acc, Quad w, N a) { return _mm512_dpbusd_epi32(acc, w, a); }
  static N dot_s16(N acc, N w, N a) { return _mm512_dpwssd_epi32(acc, w, a); }

  template <int S>
  using Bf16Pairs = Panel<Avx512>::Pairs<S>;  // never asked for: bf16 weights are their own panel

  template <int S>
  struct Fp8Pairs {
    const uint8_t* weights;
    Fp8Pairs(const Chunk& c, int) : weights(c.weights) {}
    void load(int64_t pair, Pair (&w)[2]) const { decode_fp8(_mm512_loadu_si512(weights + pair * 64), w); }
    void finish() const {}
  };
  template <int S>
  struct Int4Pairs {
    const uint8_t* weights;
    __m512i zero0, zero1;
    Int4Pairs(const Chunk& c, int)
        : weights(c.weights),
          zero0(Avx512Panels<false>::load_zeros(c.zeros)),
          zero1(Avx512Panels<false>::load_zeros(c.zeros + 16)) {}
    void load(int64_t pair, Pair (&w)[2]) const {
      nibbles(weights + pair / 2 * 64, w);
      for (int v = 0; v < 2; ++v) w[v] = bf16_pairs(w[v], int(pair % 2), v ? zero1 : zero0);
    }
    void finish() const {}
  };
  template <int S>
  struct UnsignedQuads {
    const uint8_t* weights;
    UnsignedQuads(const Chunk& c, int) : weights(c.weights) {}
    void load(int64_t quad, Quad (&w)[2]) const {
      for (int v = 0; v < 2; ++v) w[v] = plus_128(_mm512_loadu_si512(weights + quad * 128 + v * 64));
    }
  };
  template <int S>
  struct Int4Quads {
    const uint8_t* weights;
    Int4Quads(const Chunk& c, int) : weights(c.weights) {}
    void load(int64_t quad, Quad (&w)[2]) const { nibbles(weights + quad * 64, w); }
  };
};

}  // namespace

TILEWRIGHT_ISA(avx512, VectorIsa<Avx512>)
