#pragma once
// Norms of rows by their root mean square, with the same bits on every instruction set; reference.py states the steps.
#include "../norm.h"
#include "rows-inl.h"

namespace {

// Rows [begin, end).
template <class I>
void rms_norm(const Norm* p, int64_t begin, int64_t end, void* scratch) {
  const int64_t k = p->k;
  float* const values = static_cast<float*>(scratch);
  float* const weight = values + k;
  void* const rounded = weight + k;
  to_floats<I>(p->weight, p->weight_dtype, k, weight);
  for (int64_t row = begin; row < end; ++row) {
    to_floats<I>(element(p->x, p->dtype, row * p->x_stride), p->dtype, k, values);
    const float scale = 1.0f / __builtin_sqrtf(dot(values, values, k) / float(k) + p->epsilon);
    for (int64_t i = 0; i < k; ++i) values[i] *= scale;
    if (p->dtype != Float::f32) {
      from_floats<I>(values, p->dtype, k, rounded);
      to_floats<I>(rounded, p->dtype, k, values);
    }
    for (int64_t i = 0; i < k; ++i) values[i] *= weight[i];
    from_floats<I>(values, p->y_dtype, k, element(p->y, p->y_dtype, row * k));
  }
}

}  // namespace
