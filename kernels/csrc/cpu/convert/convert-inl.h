// Quantization arithmetic in loops that compilers turn into vector code. Compiled once for each instruction set,
// without fused multiply-add, so that each gives the bits of the formulas (and of plain torch).
#include "pack-inl.h"

namespace {

constexpr int64_t kTile = 4096;  // columns whose maxima stay in the first-level cache

// -- Reading: the magnitude of a number as an integer of its own width orders like the number, NaN above infinity.

struct ReadF32 {
  using Word = uint32_t;
  using Magnitude = int32_t;
  static constexpr Magnitude kMask = 0x7fffffff;
  static float value(uint32_t w) { return from_bits(w); }
};

struct ReadBf16 {
  using Word = uint16_t;
  using Magnitude = int16_t;
  static constexpr Magnitude kMask = 0x7fff;
  static float value(uint16_t w) { return bf16_to_float(w); }
};

struct ReadF16 {
  using Word = uint16_t;
  using Magnitude = int16_t;
  static constexpr Magnitude kMask = 0x7fff;
  // Branch-free: the exponent is moved by a multiplication, which is exact for subnormals too; infinity and NaN keep
  // their exponent of ones.
  static float value(uint16_t w) {
    const uint32_t sign = uint32_t(w & 0x8000) << 16, magnitude = uint32_t(w & 0x7fff) << 13;
    const uint32_t moved = bits(from_bits(magnitude) * 0x1p112f);
    return from_bits(sign | (magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : moved));
  }
};

struct ReadE4m3 {
  using Word = uint8_t;
  using Magnitude = int8_t;
  static constexpr Magnitude kMask = 0x7f;
  static float value(uint8_t w) {
    const uint32_t magnitude = w & 0x7f;
    const uint32_t moved = bits(from_bits(magnitude << 20) * 0x1p120f);  // exact, subnormals too
    return from_bits(uint32_t(w & 0x80) << 24 | (magnitude == 0x7f ? 0x7fc00000 : moved));
  }
};

template <class F>
void with_reader(Float dtype, F f) {
  if (dtype == Float::bf16) return f(ReadBf16());
  if (dtype == Float::f16) return f(ReadF16());
  return f(ReadF32());
}

template <class R>
const typename R::Word* row_of(const Blocks& b, int64_t row) {
  return static_cast<const typename R::Word*>(b.data) + row * b.stride;
}

template <class R>
float largest(const typename R::Magnitude* values, int64_t count) {
  typename R::Magnitude most = 0;
  for (int64_t i = 0; i < count; ++i) most = values[i] > most ? values[i] : most;
  return R::value(typename R::Word(most));
}

template <class R>
void block_amax(const Blocks& b, int64_t begin, int64_t end, float* out) {
  using Magnitude = typename R::Magnitude;
  // A whole number of blocks at a time, or part of a single block.
  const int64_t tile = b.block_k < kTile ? kTile / b.block_k * b.block_k : kTile;
  Magnitude most[kTile];
  for (int64_t i = begin; i < end; ++i) {
    float* maxima = out + i * b.columns();
    for (int64_t j = 0; j < b.columns(); ++j) maxima[j] = 0;
    for (int64_t k0 = 0, width; k0 < b.k; k0 += width) {
      width = smaller(tile, b.block_k < kTile ? b.k - k0 : smaller(b.k, (k0 / b.block_k + 1) * b.block_k) - k0);
      memset(most, 0, sizeof(Magnitude) * size_t(width));
      for (int64_t row = i * b.block_n; row < smaller((i + 1) * b.block_n, b.n); ++row) {
        const typename R::Word* x = row_of<R>(b, row) + k0;
        for (int64_t k = 0; k < width; ++k) {
          const Magnitude m = Magnitude(x[k] & R::kMask);
          most[k] = m > most[k] ? m : most[k];
        }
      }
      for (int64_t k = 0; k < width; k += b.block_k) {
        float& maximum = maxima[(k0 + k) / b.block_k];
        const float here = largest<R>(most + k, smaller(b.block_k, width - k));
        maximum = bits(here) > bits(maximum) ? here : maximum;  // as integers: a NaN wins
      }
    }
  }
}

// -- Codes. Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the low bits.

constexpr float kRound = 0x1.8p23f;

inline float clamp(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

struct Int8 {
  static uint8_t code(float q) { return uint8_t(bits(clamp(q, -127.0f, 127.0f) + kRound)); }
  static float nearest(float q) { return (clamp(q, -127.0f, 127.0f) + kRound) - kRound; }
};

struct Int4 {
  static uint8_t code(float q) { return uint8_t(bits(clamp(q, -8.0f, 7.0f) + kRound) + 8) & 15; }
  static float nearest(float q) { return (clamp(q, -8.0f, 7.0f) + kRound) - kRound; }
};

struct Fp8 {  // e4m3fn: 4 bits of exponent (bias 7), 3 of mantissa, 448 the largest
  static uint8_t code(float q) {
    const uint32_t u = bits(clamp(q, -448.0f, 448.0f)), sign = u >> 24 & 0x80, magnitude = u & 0x7fffffff;
    const uint32_t normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1) - (120u << 23)) >> 20;
    const uint32_t subnormal = bits(from_bits(magnitude) + 0x1p14f) - bits(0x1p14f);  // its last bit is 2^-9
    return uint8_t(sign | (magnitude < (121u << 23) ? subnormal : normal));
  }
  static float nearest(float q) {
    const float c = clamp(q, -448.0f, 448.0f);
    const uint32_t u = bits(c), sign = u & 0x80000000, magnitude = u & 0x7fffffff;
    const uint32_t normal = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) & ~0xfffffu;
    const float subnormal = (from_bits(magnitude) + 0x1p14f) - 0x1p14f;
    return from_bits(sign | (magnitude < (121u << 23) ? bits(subnormal) : normal));
  }
};

template <class F>
void with_code(Code code, F f) {
  if (code == Code::fp8) return f(Fp8());
  if (code == Code::int8) return f(Int8());
  return f(Int4());
}

template <class R, class C>
void encode(const Blocks& b, const float* scales, int64_t begin, int64_t end, uint8_t* codes) {
  for (int64_t row = begin * b.block_n; row < smaller(end * b.block_n, b.n); ++row) {
    const typename R::Word* __restrict x = row_of<R>(b, row);
    const float* scale = scales + row / b.block_n * b.columns();
    uint8_t* __restrict out = codes + row * b.k;
    for (int64_t k0 = 0; k0 < b.k; k0 += b.block_k) {
      const float s = scale[k0 / b.block_k];
      const int64_t stop = smaller(k0 + b.block_k, b.k);
      for (int64_t k = k0; k < stop; ++k) out[k] = C::code(R::value(x[k]) / s);
    }
  }
}

// Sum in halves: the upper half is added onto the lower until one element is left; `stride` apart.
inline float halving_sum(float* values, int64_t length, int64_t stride) {
  while (length > 1) {
    const int64_t half = ceil_div(length, 2), upper = length - half;
    for (int64_t i = 0; i < upper; ++i) values[i * stride] = values[i * stride] + values[(half + i) * stride];
    length = half;
  }
  return values[0];
}

template <class R, class C>
void squared_error(const Blocks& b, const float* scales, int64_t begin, int64_t end, float* scratch, float* out) {
  float* sums = scratch;                              // [block_n, columns]
  float* errors = scratch + b.block_n * b.columns();  // [block_k]
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t r = 0; r < b.block_n; ++r) {
      const int64_t row = i * b.block_n + r;
      for (int64_t j = 0; j < b.columns(); ++j) {
        if (row >= b.n) {
          sums[r * b.columns() + j] = 0;
          continue;
        }
        const typename R::Word* __restrict x = row_of<R>(b, row) + j * b.block_k;
        const int64_t width = smaller(b.block_k, b.k - j * b.block_k);
        const float s = scales[i * b.columns() + j];
        float* __restrict e = errors;
        for (int64_t k = 0; k < width; ++k) {
          const float w = R::value(x[k]), error = C::nearest(w / s) * s - w;
          e[k] = error * error;
        }
        for (int64_t k = width; k < b.block_k; ++k) e[k] = 0;
        sums[r * b.columns() + j] = halving_sum(errors, b.block_k, 1);
      }
    }
    for (int64_t j = 0; j < b.columns(); ++j) out[i * b.columns() + j] = halving_sum(sums + j, b.block_n, b.columns());
  }
}

inline void join(const uint8_t* __restrict codes, int64_t count, uint8_t* __restrict out) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t pair;
    memcpy(&pair, codes + 2 * i, 2);
    out[i] = uint8_t(pair | pair >> 4);
  }
}

inline void split(const uint8_t* __restrict joined, int64_t count, uint8_t flip, uint8_t* __restrict codes) {
  const uint16_t both = uint16_t(flip | flip << 8);
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t byte = joined[i], pair = uint16_t(((byte & 15) | (byte & 0xf0) << 4) ^ both);
    memcpy(codes + 2 * i, &pair, 2);
  }
}

struct FromInt8 {
  static float value(uint8_t c) { return float(int8_t(c)); }
};
struct FromInt4 {
  static float value(uint8_t c) { return float(int32_t(c) - 8); }
};

template <class V>
void scale_codes(const Blocks& b, const float* scales, int64_t row0, float* out) {
  for (int64_t row = 0; row < b.n; ++row) {
    const uint8_t* __restrict x = static_cast<const uint8_t*>(b.data) + row * b.stride;
    const float* scale = scales + (row0 + row) / b.block_n * b.columns();
    float* __restrict y = out + row * b.k;
    for (int64_t k0 = 0; k0 < b.k; k0 += b.block_k) {
      const float s = scale[k0 / b.block_k];
      const int64_t stop = smaller(k0 + b.block_k, b.k);
      for (int64_t k = k0; k < stop; ++k) y[k] = V::value(x[k]) * s;
    }
  }
}

void block_amax_entry(const Blocks* b, int64_t begin, int64_t end, float* out) {
  if (b->dtype == Float::e4m3) return block_amax<ReadE4m3>(*b, begin, end, out);
  with_reader(b->dtype, [&](auto r) { block_amax<decltype(r)>(*b, begin, end, out); });
}

void encode_entry(const Blocks* b, const float* scales, Code code, int64_t begin, int64_t end, uint8_t* codes) {
  with_reader(b->dtype, [&](auto r) {
    with_code(code, [&](auto c) { encode<decltype(r), decltype(c)>(*b, scales, begin, end, codes); });
  });
}

void squared_error_entry(const Blocks* b, const float* scales, Code code, int64_t begin, int64_t end, float* scratch,
                         float* out) {
  with_reader(b->dtype, [&](auto r) {
    with_code(code, [&](auto c) { squared_error<decltype(r), decltype(c)>(*b, scales, begin, end, scratch, out); });
  });
}

void scale_codes_entry(const Blocks* b, const float* scales, Code code, int64_t row0, float* out) {
  if (code == Code::fp8) return scale_codes<ReadE4m3>(*b, scales, row0, out);
  if (code == Code::int8) return scale_codes<FromInt8>(*b, scales, row0, out);
  scale_codes<FromInt4>(*b, scales, row0, out);
}

}  // namespace

#include "compare-inl.h"

#define TILEWRIGHT_CONVERT(name)                                                                        \
  extern "C" __attribute__((visibility("hidden"))) const tilewright::Convert tilewright_convert_##name; \
  const tilewright::Convert tilewright_convert_##name = {                                               \
      block_amax_entry, encode_entry, squared_error_entry, join, split, scale_codes_entry,              \
      pack_words,       pack_int4,    code_errors_entry};
