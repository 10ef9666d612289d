// What the operator of norms hands to the code of an instruction set: plain data, as in table.h.
#pragma once
#include "table.h"

namespace tilewright {

// y[m, k] = weight * round(x * 1 / sqrt(mean(x^2) + epsilon)), in fp32, rounded to the dtype of x, then to that of y.
struct Norm {
  Float dtype, weight_dtype, y_dtype;
  int64_t k;
  const void* x;  // [m, k], rows `x_stride` elements apart
  int64_t x_stride;
  const void* weight;  // [k]
  float epsilon;
  void* y;  // [m, k], contiguous
};

// Scratch memory of one thread.
inline size_t norm_bytes(const Norm& p) { return size_t(p.k) * 10; }

}  // namespace tilewright
