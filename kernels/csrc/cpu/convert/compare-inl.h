// What verification measures of a quantized weight beside its source, block by block, in one pass over both.
// Included by convert-inl.h, whose readers and grids it uses.
#include "table.h"

namespace {

constexpr int64_t kRun = 512;  // columns whose results lie in the first-level cache before they are added up

// Half the distance between neighbours on the grid around q, as the number formats state it.
struct Half {
  static float step(Fp8, float q) {
    const float relative = from_bits(bits(q) & 0x7fffffff) * 0x1p-4f;
    return relative < 0x1p-10f ? 0x1p-10f : relative;
  }
  template <class Integer>
  static float step(Integer, float) {
    return 0.5f;
  }
};

struct LargestStep {
  static float of(Fp8) { return 448.0f; }
  static float of(Int8) { return 127.0f; }
  static float of(Int4) { return 7.0f; }
};

inline float magnitude(float x) { return from_bits(bits(x) & 0x7fffffff); }

// The largest in halves, NaN above all; destroys the values.
inline float halving_max(float* values, int64_t length) {
  while (length > 1) {
    const int64_t half = ceil_div(length, 2), upper = length - half;
    for (int64_t i = 0; i < upper; ++i) {
      const uint32_t a = bits(values[i]), b = bits(values[half + i]);  // not negative: they order like integers
      values[i] = from_bits(a > b ? a : b);
    }
    length = half;
  }
  return values[0];
}

inline float halving_total(float* values, int64_t length) {
  while (length > 1) {
    const int64_t half = ceil_div(length, 2), upper = length - half;
    for (int64_t i = 0; i < upper; ++i) values[i] = values[i] + values[half + i];
    length = half;
  }
  return values[0];
}

struct RunResults {
  float error[kRun], largest[kRun], norm[kRun], worst[kRun], nearest[kRun], outside[kRun], code[kRun];
};

// 2^-e for a number 2^e * [1, 2): squares of what is multiplied by it neither vanish nor overflow.
inline float unit_of(float number) {
  const uint32_t exponent = bits(number) >> 23 & 0xff;
  return from_bits((254 - (exponent < 253 ? exponent : 253)) << 23);
}

// One run of columns under one scale `s`; `ideal` is the scale that the format's own rule gives for the source.
template <class R, class C, class V>
void compare_run(const typename R::Word* __restrict x, const uint8_t* __restrict codes, int64_t width, float s,
                 float ideal, RunResults* __restrict out) {
  const float most = LargestStep::of(C()), unit = unit_of(ideal);
  constexpr float kShare = 0x1p-8f;  // by which rounding to bf16 may change a scale
  for (int64_t k = 0; k < width; ++k) {
    const float w = R::value(x[k]), c = V::value(codes[k]), q = w / s;
    const float difference = c * s - w, half = Half::step(C(), q), level = magnitude(c);
    out->error[k] = (difference * unit) * (difference * unit);
    out->largest[k] = magnitude(difference);
    out->norm[k] = (w * unit) * (w * unit);
    out->code[k] = level;
    const bool far = magnitude(q - c) > half + (level + half) * kShare;
    const bool clipped = level >= most && magnitude(q) >= level && (q > 0) == (c > 0);
    out->outside[k] = far && !clipped ? 1.0f : 0.0f;
  }
  for (int64_t k = 0; k < width; ++k) {
    const float w = R::value(x[k]), q = w / ideal, allowed = Half::step(C(), q) * (ideal * unit);
    const float error = (C::nearest(clamp(q, -most, most)) * ideal - w) * unit;
    out->worst[k] = allowed * allowed;
    out->nearest[k] = error * error;
  }
}

template <class R, class C, class V>
void code_errors(const Comparison& c, int64_t begin, int64_t end) {
  const Blocks& b = c.weight;
  RunResults run;
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t j = 0; j < b.columns(); ++j) {
      const int64_t block = i * b.columns() + j;
      double* out = c.out + block * kMeasures;
      const double unit = double(unit_of(c.ideal[block])), square = 1.0 / (unit * unit);
      const int64_t stop = smaller((j + 1) * b.block_k, b.k);
      for (int64_t row = i * b.block_n; row < smaller((i + 1) * b.block_n, b.n); ++row) {
        for (int64_t k0 = j * b.block_k, width; k0 < stop; k0 += width) {
          width = smaller(kRun, stop - k0);
          compare_run<R, C, V>(row_of<R>(b, row) + k0, c.codes + row * b.k + k0, width, c.scales[block], c.ideal[block],
                               &run);
          out[0] += double(halving_total(run.error, width)) * square;
          out[1] += double(halving_total(run.norm, width)) * square;
          out[2] += double(halving_total(run.worst, width)) * square;
          out[3] += double(halving_total(run.nearest, width)) * square;
          out[4] += double(halving_total(run.outside, width));
          const double largest = double(halving_max(run.largest, width)), code = double(halving_max(run.code, width));
          out[5] = largest <= out[5] ? out[5] : largest;  // a NaN wins, as in the halves
          out[6] = code <= out[6] ? out[6] : code;
        }
      }
    }
  }
}

void code_errors_entry(const Comparison* c, Code code, int64_t begin, int64_t end) {
  with_reader(c->weight.dtype, [&](auto r) {
    using R = decltype(r);
    if (code == Code::fp8) return code_errors<R, Fp8, ReadE4m3>(*c, begin, end);
    if (code == Code::int8) return code_errors<R, Int8, FromInt8>(*c, begin, end);
    code_errors<R, Int4, FromInt4>(*c, begin, end);
  });
}

}  // namespace
