#pragma once
// Products on vector registers, one text for every instruction set that has them. V describes the registers:
//   F, N           kLanes fp32 or int32 lanes, one column each
//   Pair           weights of two k for kLanes columns;  Quad: weights of four k
//   dot_pair       acc + w . a for one row, both k;      dot_s8, dot_u4: the same for four k, signed or 4-bit codes
//   kBiasedInt8    dot_s8 takes activations as a + 128, and dot_u4 any unsigned code
//   multiply_add   a * b + c, rounded once
//   vectors(rows)  registers of columns for each row, when `rows` rows share the register file
//   Bf16Pairs, Fp8Pairs, Int4Pairs, Int4Quads, UnsignedQuads (int8 codes + 128)  sources of weights that decode in
//   registers, see Panel*
//   Mxfp4          the same for mxfp4, 8 k of one vector of columns at a time: twice the values as int16, two k a lane
//   dot_s16        acc + w . a for two k, int16
#include "linear-inl.h"

namespace {

// Calls f(0), ..., f(N - 1) with constants: a loop over registers must not be a loop when the compiler decides which
// arrays become registers.
template <int I>
struct Index {
  static constexpr int value = I;
  constexpr operator int() const { return I; }
};
template <int N, int I = 0, class F>
[[gnu::always_inline]] inline void each(const F& f) {
  if constexpr (I < N) {
    f(Index<I>{});
    each<N, I + 1>(f);
  }
}
#define TILEWRIGHT_EACH(i, n) each<n>([&](auto i) __attribute__((always_inline))

// Up to so many rows are multiplied with weights decoded in registers; with more, decoding once into a panel is
// cheaper. The values are the same, and so are the results.
constexpr int kRowsWithoutPanel = 4;

// Sources give the weights of S vectors of columns from vector `first` on, pair by pair or quad by quad of k.
template <class V>
struct Panel {
  template <int S>
  struct Pairs {
    const uint8_t* panel;
    int first;
    Pairs(const Chunk& c, int first_vector) : panel(c.panel), first(first_vector) {}
    void load(int64_t pair, typename V::Pair (&w)[S]) const {
      for (int v = 0; v < S; ++v) w[v] = V::load_pair(panel, pair, first + v);
    }
    void finish() const {}
  };
  template <int S>
  struct Quads {
    const uint8_t* panel;
    Quads(const Chunk& c, int first_vector) : panel(c.panel + first_vector * V::kLanes * 4) {}
    void load(int64_t quad, typename V::Quad (&w)[S]) const {
      for (int v = 0; v < S; ++v) w[v] = V::load_quad(panel + quad * kBlockN * 4 + v * V::kLanes * 4);
    }
  };
};

// Some rows of one group, and where their sums are.
struct Rows {
  const uint32_t* a;  // packed activations of the group
  void* sum;          // [rows][32]
  int64_t first;      // row of x
};

// sum += products of one k_group * scale for the columns from vector v0 on; product and sum are rounded apart.
template <class V, int R, template <int> class Source>
[[gnu::always_inline]] inline void float_k_group(const Chunk& c, const Rows& at, int v0) {
  constexpr int kVectors = V::vectors(R), kLanes = V::kLanes;
  const uint32_t* const a = at.a + c.unit * R;
  typename V::F acc[R][kVectors];
  TILEWRIGHT_EACH(r, R) {
    TILEWRIGHT_EACH(v, kVectors) { acc[r][v] = V::zero(); });
  });
  Source<kVectors> source(c, v0);
  for (int64_t p = 0; p < c.columns / 2; ++p) {
    typename V::Pair w[kVectors];
    source.load(p, w);
    TILEWRIGHT_EACH(r, R) {
      const typename V::PairActivation pair = V::template load_activation<R>(a, p, r);
      TILEWRIGHT_EACH(v, kVectors) { acc[r][v] = V::dot_pair(acc[r][v], w[v], pair); });
    });
  }
  source.finish();
  TILEWRIGHT_EACH(v, kVectors) {
    const typename V::F scale = c.scale ? V::load(c.scale + (v0 + v) * kLanes) : V::zero();
    TILEWRIGHT_EACH(r, R) {
      float* const s = static_cast<float*>(at.sum) + r * kBlockN + (v0 + v) * kLanes;
      const typename V::F part = c.scale ? V::multiply(acc[r][v], scale) : acc[r][v];
      V::store(s, V::add(c.first ? V::zero() : V::load(s), part));
    });
  });
}

// The g-th group of columns of mxfp4: sum += float(sum of integers) * row_scale * scale for the columns from vector v0
// on. The scales are powers of two and the integers below 2^24, so only the sum is rounded.
template <class V, int R, bool kPanel>
[[gnu::always_inline]] inline void mxfp4_group(const Gemm* p, const Chunk& c, const Rows& at, int64_t g, int v0) {
  constexpr int kVectors = V::vectors(R), kLanes = V::kLanes, kUnitPairs = 4, kUnits = int(kMxfp4Group) / 8;
  if constexpr (!kPanel) mxfp4_scales(c, g);
  const uint32_t* const a = at.a + (c.unit + g * kUnits * kUnitPairs) * R;
  typename V::N acc[R][kVectors];
  TILEWRIGHT_EACH(r, R) {
    TILEWRIGHT_EACH(v, kVectors) { acc[r][v] = V::zero_int(); });
  });
  if constexpr (kPanel) {
    const uint8_t* const panel = c.panel + g * c.k_group_panel + v0 * kLanes * 4;
    for (int pair = 0; pair < kUnits * kUnitPairs; ++pair) {
      typename V::N w[kVectors];
      TILEWRIGHT_EACH(v, kVectors) {
        w[v] = V::load_int(reinterpret_cast<const int32_t*>(panel + pair * kBlockN * 4 + v * kLanes * 4));
      });
      TILEWRIGHT_EACH(r, R) {
        const typename V::N activation = V::broadcast(a[pair * R + r]);
        TILEWRIGHT_EACH(v, kVectors) { acc[r][v] = V::dot_s16(acc[r][v], w[v], activation); });
      });
    }
  } else {
    const uint8_t* codes = c.weights + g / 2 * kMxfp4Bytes + kMxfp4Scales + g % 2 * (kMxfp4Group / 2) * kBlockN;
    for (int u = 0; u < kUnits; ++u) TILEWRIGHT_EACH(v, kVectors) {
        const typename V::Mxfp4 source(codes + u * 128 + (v0 + v) * kLanes * 4);
        TILEWRIGHT_EACH(i, kUnitPairs) {
          const typename V::N w = source.template pair<i.value>();
          TILEWRIGHT_EACH(r, R) { acc[r][v] = V::dot_s16(acc[r][v], w, V::broadcast(a[(u * kUnitPairs + i) * R + r])); });
        });
      });
  }
  TILEWRIGHT_EACH(v, kVectors) {
    const int column = (v0 + v) * kLanes;
    const typename V::F scale = V::load(c.scale + g * kBlockN + column);
    TILEWRIGHT_EACH(r, R) {
      float* const s = static_cast<float*>(at.sum) + r * kBlockN + column;
      const typename V::F factor = V::broadcast_float(c.row_scale[(at.first + r) * p->plan.scales_per_row + g]);
      const typename V::F part = V::multiply(V::multiply(V::to_float(acc[r][v]), factor), scale);
      V::store(s, V::add(c.first && g == 0 ? V::zero() : V::load(s), part));
    });
  });
}

// How the integers of a k_group become part of the sums.
enum class Products {
  int8,           // sum += dot, an integer
  int8_by_group,  // sum = fma(float(dot), row_scale, sum)
  int4,           // sum += float(dot) * scale, rounded apart; dot = sum of a * (code - zero)
  int4_by_group,  // sum = fma(float(dot), scale * row_scale, sum)
};

// The same for integers. Where int8 codes must be unsigned, they are code + 128, and the zero point is 128.
template <class V, int R, template <int> class Source, Products kProducts>
[[gnu::always_inline]] inline void int_k_group(const Gemm* p, const Chunk& c, const Rows& at, int v0) {
  constexpr int kVectors = V::vectors(R), kLanes = V::kLanes;
  constexpr bool kInt4 = kProducts == Products::int4 || kProducts == Products::int4_by_group;
  constexpr bool kByGroup = kProducts == Products::int8_by_group || kProducts == Products::int4_by_group;
  constexpr bool kZeros = kInt4 || (kByGroup && V::kBiasedInt8);
  // One zero point for all codes is taken off before the products are added.
  constexpr bool kTakesOffFirst = kProducts == Products::int8_by_group && V::kBiasedInt8;
  const uint32_t* const a = at.a + c.unit * R;
  const int64_t sums_stride = p->plan.sums_per_row, scales_stride = p->plan.scales_per_row;
  const int32_t* const row_sums = kInt4 || kTakesOffFirst ? c.sums + at.first * sums_stride : nullptr;
  const float* const row_scales = kByGroup ? c.row_scale + at.first * scales_stride : nullptr;
  typename V::N acc[R][kVectors];
  TILEWRIGHT_EACH(r, R) {
    typename V::N start = V::zero_int();
    if constexpr (kTakesOffFirst) start = V::broadcast(uint32_t(row_sums[r * sums_stride]) * uint32_t(-128));
    TILEWRIGHT_EACH(v, kVectors) { acc[r][v] = start; });
  });
  const Source<kVectors> source(c, v0);
  for (int64_t q = 0; q < c.columns / 4; ++q) {
    typename V::Quad w[kVectors];
    source.load(q, w);
    TILEWRIGHT_EACH(r, R) {
      const typename V::N quad = V::broadcast(a[q * R + r]);
      TILEWRIGHT_EACH(v, kVectors) {
        acc[r][v] = kZeros ? V::dot_u4(acc[r][v], w[v], quad) : V::dot_s8(acc[r][v], w[v], quad);
      });
    });
  }
  if constexpr (kProducts == Products::int8) {
    TILEWRIGHT_EACH(v, kVectors) {
      TILEWRIGHT_EACH(r, R) {
        int32_t* const s = static_cast<int32_t*>(at.sum) + r * kBlockN + (v0 + v) * kLanes;
        V::store_int(s, V::add_int(c.first ? V::zero_int() : V::load_int(s), acc[r][v]));
      });
    });
    return;
  }
  float* const sums = static_cast<float*>(at.sum) + v0 * kLanes;
  const auto add = [&](auto is_first) __attribute__((always_inline)) {
    TILEWRIGHT_EACH(v, kVectors) {
      const int column = (v0 + v) * kLanes;
      const typename V::N zeros = kInt4 ? V::load_zeros(c.zeros + column) : V::zero_int();
      const typename V::F scale = kInt4 ? V::load(c.scale + column) : V::zero();
      TILEWRIGHT_EACH(r, R) {
        float* const s = sums + r * kBlockN + v * kLanes;
        typename V::N dot = acc[r][v];
        if constexpr (kInt4)
          dot = V::subtract(dot, V::multiply_int(zeros, V::broadcast(uint32_t(row_sums[r * sums_stride]))));
        const typename V::F value = V::to_float(dot), sum = is_first.value ? V::zero() : V::load(s);
        if constexpr (kByGroup) {
          const typename V::F factor = V::broadcast_float(row_scales[r * scales_stride]);
          V::store(s, V::multiply_add(value, kInt4 ? V::multiply(scale, factor) : factor, sum));
        } else {
          V::store(s, V::add(sum, V::multiply(value, scale)));
        }
      });
    });
  };
  if (c.first)
    add(Index<1>{});
  else
    add(Index<0>{});
}

template <class V, int R, template <int> class Source>
inline void float_rows(const Chunk& c, const Rows& at) {
  for (int v0 = 0; v0 < kBlockN / V::kLanes; v0 += V::vectors(R))
    for (int64_t f = 0; f < c.k_groups; ++f) float_k_group<V, R, Source>(k_group_of(c, f), at, v0);
}

template <class V, int R, bool kPanel>
inline void mxfp4_rows(const Gemm* p, const Chunk& c, const Rows& at) {
  for (int v0 = 0; v0 < kBlockN / V::kLanes; v0 += V::vectors(R))
    for (int64_t g = 0; g < c.k_groups; ++g) mxfp4_group<V, R, kPanel>(p, c, at, g, v0);
}

template <class V, int R, template <int> class Source, Products kProducts>
inline void int_rows(const Gemm* p, const Chunk& c, const Rows& at) {
  for (int v0 = 0; v0 < kBlockN / V::kLanes; v0 += V::vectors(R))
    for (int64_t f = 0; f < c.k_groups; ++f) int_k_group<V, R, Source, kProducts>(p, k_group_of(c, f), at, v0);
}

template <class V, int R, template <int> class Source>
inline void int4_rows(const Gemm* p, const Chunk& c, const Rows& at) {
  if (c.row_scale)
    int_rows<V, R, Source, Products::int4_by_group>(p, c, at);
  else
    int_rows<V, R, Source, Products::int4>(p, c, at);
}

template <class V, int R>
inline void with_panel(const Gemm* p, const Chunk& c, const Rows& at) {
  if (p->problem.kind == Kind::int8 && c.row_scale)
    int_rows<V, R, Panel<V>::template Quads, Products::int8_by_group>(p, c, at);
  else if (p->problem.kind == Kind::int8)
    int_rows<V, R, Panel<V>::template Quads, Products::int8>(p, c, at);
  else if (p->problem.kind == Kind::int4_int8)
    int4_rows<V, R, Panel<V>::template Quads>(p, c, at);
  else if (p->problem.kind == Kind::mxfp4)
    mxfp4_rows<V, R, true>(p, c, at);
  else
    float_rows<V, R, Panel<V>::template Pairs>(c, at);
}

template <class V, int R>
inline void without_panel(const Gemm* p, const Chunk& c, const Rows& at) {
  if (p->problem.kind == Kind::bf16)
    float_rows<V, R, V::template Bf16Pairs>(c, at);
  else if (p->problem.kind == Kind::fp8)
    float_rows<V, R, V::template Fp8Pairs>(c, at);
  else if (p->problem.kind == Kind::int4_bf16)
    float_rows<V, R, V::template Int4Pairs>(c, at);
  else if (p->problem.kind == Kind::int4_int8)
    int4_rows<V, R, V::template Int4Quads>(p, c, at);
  else if (p->problem.kind == Kind::mxfp4)
    mxfp4_rows<V, R, false>(p, c, at);
  else if constexpr (V::kBiasedInt8)
    int_rows<V, R, V::template UnsignedQuads, Products::int8_by_group>(p, c, at);
}

template <class V, int R>
inline void on_rows(int64_t rows, const Gemm* p, const Chunk& c, const Rows& at) {
  if (rows != R) {
    if constexpr (R > 1) on_rows<V, R - 1>(rows, p, c, at);
    return;
  }
  if constexpr (V::kDecodes && R <= kRowsWithoutPanel)
    if (!c.panel) return without_panel<V, R>(p, c, at);
  with_panel<V, R>(p, c, at);
}

template <class V>
struct VectorIsa : V {
  static constexpr int kMaxKGroups = 16;
  static constexpr bool kChained = false, kInt16 = true;
  static constexpr int64_t kMaxBlocksPerPass = 1;
  const Gemm* p;

  explicit VectorIsa(const Gemm* problem) : p(problem) {}
  static int64_t span(Kind, int64_t) { return 1; }
  static bool needs_panel(int64_t rows) { return !V::kDecodes || rows > kRowsWithoutPanel; }

  void multiply(const Chunk* chunk, int, int64_t row_begin, int64_t row_end) const {
    const Chunk& c = *chunk;
    for (int64_t r = row_begin; r < row_end; r += p->plan.rows) {
      const int64_t rows = smaller(p->plan.rows, p->problem.m - r);
      constexpr int kMost = V::kIntRows > V::kFloatRows ? V::kIntRows : V::kFloatRows;
      const uint32_t* a = p->memory.activations + r * p->plan.units;
      on_rows<V, kMost>(rows, p, c, {a, static_cast<float*>(c.sum) + (r - row_begin) * kBlockN, r});
    }
  }
};

}  // namespace
