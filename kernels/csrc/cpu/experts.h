// What the operators over experts hand to the code of an instruction set: plain data, as in table.h.
#pragma once
#include "table.h"

namespace tilewright {

enum class Activation : int32_t { silu, gelu, gelu_tanh, clamped_swiglu };

struct Gate {
  Activation activation;
  float alpha, limit;  // of clamped_swiglu
};

// Packed matrices of one shape, one after the other.
struct Stack {
  Gemm first;                                       // planned; its memory is that of the first routed row
  int64_t weight_stride;                            // bytes from one matrix to the next
  int64_t scale_stride, zeros_stride, bias_stride;  // elements
};

// The rows that go to one expert: a range of all routed rows.
struct Routed {
  int64_t expert, first, count;
};

// A routed row is a token at one of its experts; they are sorted by expert, then by token.
//   inner[row] = bf16(act(gate . x[token]) * (up . x[token]))
//   y[token] = round(sum over rows of weight[row] * (down . inner[row]) * routed_scale + add[token] * add_scale)
struct Experts {
  Gemm tokens;    // x and its rows in units, one after the other; a row_scale and row_sums for each
  Stack gate_up;  // matrix 2 e is the gate of expert e, 2 e + 1 its up
  Stack down;     // matrix e; x is `inner`, y the result
  Gate gate;
  int64_t tile_rows;     // routed rows of one expert that are computed together, a multiple of `rows` of the stacks
  const int32_t* token;  // [routed rows]
  const float* weight;   // [routed rows]
  uint16_t* inner;       // [routed rows, inner]
  float routed_scale;
  const void* add;  // [tokens, hidden] of the dtype of x, or null
  float add_scale;
};

// A matrix with the routed rows of one expert as its x. `static`: each file that includes this has its own.
static inline Gemm matrix_of(const Stack* s, int64_t index, const Routed* r) {
  Gemm g = s->first;
  GemmProblem& p = g.problem;
  p.m = r->count;
  p.weight += index * s->weight_stride;
  if (p.scale) p.scale += index * s->scale_stride;
  if (p.zeros) p.zeros += index * s->zeros_stride;
  if (p.bias) p.bias += index * s->bias_stride;
  if (p.x) p.x = static_cast<const uint16_t*>(p.x) + r->first * p.x_stride;
  g.memory.activations += r->first * g.plan.units;
  if (g.memory.row_scale) g.memory.row_scale += r->first * g.plan.scales_per_row;
  if (g.memory.row_sums) g.memory.row_sums += r->first * g.plan.sums_per_row;
  return g;
}

}  // namespace tilewright
