#pragma once
// Gated activation functions, act(gate) * up, in fp32. Every operation is rounded apart and none depends on the
// instruction set, so their results are the same bits everywhere; reference_experts.py states the same steps.
#include "../experts.h"
#include "scalar-inl.h"

namespace {

// e^x for x in [-104, 104], which ends in 0 and infinity: 2^n e^r, |r| <= ln(2) / 2, ln(2) in two parts as W. J. Cody
// and W. Waite have it (Software Manual for the Elementary Functions, 1980, chapter 6). e^r = 1 + r + r^2 Q(r), Q of
// degree 4 fitted by least squares for these kernels, is off by less than 2^-26 of e^r (test_reference_experts.py
// measures this bound and that of erfc).
inline float exponential(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer that the low bits hold
  x = x > 104.0f ? 104.0f : x < -104.0f ? -104.0f : x;
  const float shifted = x * 1.44269504f + kRound, n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float q = 0.001393454265780747f;
  q = q * r + 0.008363776840269566f;
  q = q * r + 0.04166645556688309f;
  q = q * r + 0.16666573286056519f;
  q = q * r + 0.5f;
  const float e = (q * r) * r + r + 1.0f;
  const int32_t power = int32_t(bits(shifted) - bits(kRound)), half = power >> 1;  // 2^n alone may not be finite
  return e * from_bits(uint32_t(half + 127) << 23) * from_bits(uint32_t(power - half + 127) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// erfc(z) for z >= 0: t e^(P(t) - z^2), t = 1 / (1 + z / 2). The form is that of W. H. Press et al., Numerical Recipes
// in C, 1992, section 6.2; P of degree 9 is fitted anew for these kernels, off by less than 1.1e-7 of erfc(z).
inline float complementary_error(float z) {
  const float t = 1.0f / (1.0f + 0.5f * z);
  float p = 0.15775100886821747f;
  p = p * t + -0.7501815557479858f;
  p = p * t + 1.3186529874801636f;
  p = p * t + -0.909740686416626f;
  p = p * t + 0.09432142972946167f;
  p = p * t + -0.09025566279888153f;
  p = p * t + 0.06523264944553375f;
  p = p * t + 0.3803541362285614f;
  p = p * t + 0.9993481040000916f;
  p = p * t + -1.2654823064804077f;
  return t * exponential(p - z * z);
}

inline float silu(float x) { return x / (1.0f + exponential(-x)); }

inline float gelu(float x) {
  const float tail = 0.5f * complementary_error((x < 0.0f ? -x : x) * 0.707106781f);
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

inline float gelu_tanh(float x) {
  const float u = 1.59576912f * (x + 0.044715f * (x * x * x));  // 2 sqrt(2 / pi)
  return x / (1.0f + exponential(-u));
}

// value[i] = act(gate[i]) * up[i] for one block of columns
inline void apply_gate(const Gate& g, const float* gate, const float* up, float* value) {
  switch (g.activation) {
    case Activation::silu:
      for (int i = 0; i < kBlockN; ++i) value[i] = silu(gate[i]) * up[i];
      return;
    case Activation::gelu:
      for (int i = 0; i < kBlockN; ++i) value[i] = gelu(gate[i]) * up[i];
      return;
    case Activation::gelu_tanh:
      for (int i = 0; i < kBlockN; ++i) value[i] = gelu_tanh(gate[i]) * up[i];
      return;
    case Activation::clamped_swiglu:
      for (int i = 0; i < kBlockN; ++i) {
        const float x = gate[i] > g.limit ? g.limit : gate[i];
        const float u = up[i] > g.limit ? g.limit : up[i] < -g.limit ? -g.limit : up[i];
        value[i] = (u + 1.0f) * (x / (1.0f + exponential(-(g.alpha * x))));
      }
  }
}

}  // namespace
