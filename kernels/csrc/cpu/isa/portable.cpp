// Any processor: vector extensions of the compiler, which become SSE2, NEON or plain code.
#include "scalar-panels-inl.h"
#include "table-inl.h"
#include "vector-inl.h"

namespace {

struct Portable : ScalarPanels<Floats, false> {
  typedef float F __attribute__((vector_size(16)));
  typedef int32_t N __attribute__((vector_size(16)));
  struct Pair {
    F even, odd;
  };
  struct Quad {
    N k[4];
  };
  using PairActivation = Pair;

  static constexpr int kLanes = 4, kFloatRows = 4, kIntRows = 4;
  static constexpr bool kFloatUnits = true, kBiasedInt8 = false, kDecodes = false;
  static constexpr Blocking kBlocking{.bf16_chunk = 128,
                                      .int8_chunk = 1024,
                                      .streaming_bytes = 1 << 19,
                                      .task_rows = 128,
                                      .task_blocks = 8,
                                      .weights_ahead = 0,
                                      .l1_k_bytes = 0,
                                      .n_blocks_per_pass = 1};
  static constexpr int vectors(int) { return 2; }

  static F zero() { return F{}; }
  static N zero_int() { return N{}; }
  static F load(const float* p) {
    F f;
    memcpy(&f, p, sizeof f);
    return f;
  }
  static N load_int(const int32_t* p) {
    N n;
    memcpy(&n, p, sizeof n);
    return n;
  }
  static void store(float* p, F f) { memcpy(p, &f, sizeof f); }
  static void store_int(int32_t* p, N n) { memcpy(p, &n, sizeof n); }
  static F add(F a, F b) { return a + b; }
  static F multiply(F a, F b) { return a * b; }
  static N add_int(N a, N b) { return a + b; }
  static N subtract(N a, N b) { return a - b; }
  static N multiply_int(N a, N b) { return a * b; }
  static F to_float(N n) { return __builtin_convertvector(n, F); }
  static F broadcast_float(float f) { return F{} + f; }
  static N broadcast(uint32_t u) { return N{} + int32_t(u); }
  static N load_zeros(const int8_t* z) { return N{z[0], z[1], z[2], z[3]}; }

  static Pair load_pair(const uint8_t* panel, int64_t pair, int vector) {
    const float* p = reinterpret_cast<const float*>(panel) + pair * 2 * kBlockN + vector * kLanes;
    return {load(p), load(p + kBlockN)};
  }
  template <int R>
  static Pair load_activation(const uint32_t* a, int64_t pair, int row) {
    return {F{} + from_bits(a[pair * 2 * R + row]), F{} + from_bits(a[(pair * 2 + 1) * R + row])};
  }
  static F dot_pair(F acc, Pair w, Pair a) { return (acc + w.even * a.even) + w.odd * a.odd; }

  static Quad load_quad(const uint8_t* p) {
    Quad q;
    for (int i = 0; i < 4; ++i) q.k[i] = N{int8_t(p[i]), int8_t(p[4 + i]), int8_t(p[8 + i]), int8_t(p[12 + i])};
    return q;
  }
  static N dot_s8(N acc, const Quad& w, N a) {  // a holds four int8 in every lane
    for (int i = 0; i < 4; ++i) acc += w.k[i] * (N{} + int32_t(int8_t(uint32_t(a[0]) >> (8 * i))));
    return acc;
  }
  static N dot_s16(N acc, N w, N a) {
    for (int i = 0; i < kLanes; ++i)
      acc[i] += int16_t(w[i]) * int16_t(a[i]) + int16_t(w[i] >> 16) * int16_t(a[i] >> 16);
    return acc;
  }
  static N dot_u4(N acc, const Quad& w, N a) { return dot_s8(acc, w, a); }  // codes 0..15 are positive int8 too
};

}  // namespace

TILEWRIGHT_ISA(portable, VectorIsa<Portable>)
