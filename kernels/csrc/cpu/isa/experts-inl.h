#pragma once
// The steps of an expert layer on top of the linear driver. A row's result depends on nothing but the row.
#include "../experts.h"
#include "gates-inl.h"
#include "linear-inl.h"

namespace {

// Rounds or quantizes tokens, each once however many experts it goes to.
template <class I>
void convert_rows(const Experts* e, int64_t begin, int64_t end, void* scratch) {
  const Gemm* p = &e->tokens;
  for (int64_t t = begin; t < end; ++t) {
    uint32_t* units = p->memory.activations + t * p->plan.units;
    memset(units, 0, size_t(p->plan.units) * 4);  // the padding beyond k
    prepare_row<I>(p, t, static_cast<float*>(scratch), units);
  }
}

// Lays out the tokens of an expert's rows [begin, end) as the products read them; `begin` is a multiple of the plan's
// rows.
inline void gather_rows(const Experts* e, const Routed* routed, int64_t begin, int64_t end) {
  const Gemm p = matrix_of(&e->gate_up, 0, routed);
  const GemmPlan& plan = p.plan;
  const GemmWorkspace& from = e->tokens.memory;
  for (int64_t first = begin; first < end; first += plan.rows) {
    const int64_t rows = smaller(plan.rows, p.problem.m - first);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = first + r, token = e->token[routed->first + row];
      place_row(from.activations + token * plan.units, &p, p.memory.activations + first * plan.units, rows, r);
      for (int64_t i = 0; i < plan.scales_per_row; ++i)
        p.memory.row_scale[row * plan.scales_per_row + i] = from.row_scale[token * plan.scales_per_row + i];
      for (int64_t i = 0; i < plan.sums_per_row; ++i)
        p.memory.row_sums[row * plan.sums_per_row + i] = from.row_sums[token * plan.sums_per_row + i];
    }
  }
}

// Sums of a range. Where one group of rows reads the weights, it goes through them block after block, as they lie.
template <class I>
void accumulate_blocks(const Gemm* p, const Range& at, const TaskMemory& w, uint8_t* sums, size_t block_bytes) {
  I multiplier(p);
  if (at.row_end - at.row_begin > p->plan.rows) {
    accumulate(multiplier, p, at, w, sums, block_bytes);
    return;
  }
  for (int64_t b = at.block_begin; b < at.block_end; ++b, sums += block_bytes)
    accumulate(multiplier, p, {at.row_begin, at.row_end, b, b + 1}, w, sums, block_bytes);
}

// inner = bf16(act(gate) * up) for some rows of one expert and some blocks of columns.
template <class I>
void gate_up(const Experts* e, const Routed* routed, const Range* at, void* scratch) {
  const Gemm gate = matrix_of(&e->gate_up, 2 * routed->expert, routed);
  const Gemm up = matrix_of(&e->gate_up, 2 * routed->expert + 1, routed);
  const TaskMemory w = task_memory(gate.plan, scratch);
  const size_t block_bytes = size_t(at->row_end - at->row_begin) * kBlockN * 4;
  uint8_t* const up_sums = w.sums + size_t(at->block_end - at->block_begin) * block_bytes;
  accumulate_blocks<I>(&gate, *at, w, w.sums, block_bytes);
  accumulate_blocks<I>(&up, *at, w, up_sums, block_bytes);
  for (int64_t b = at->block_begin; b < at->block_end; ++b) {
    const Columns gate_columns = columns_of<I>(&gate, b), up_columns = columns_of<I>(&up, b);
    size_t offset = size_t(b - at->block_begin) * block_bytes;
    for (int64_t r = at->row_begin; r < at->row_end; ++r, offset += kBlockN * 4) {
      float g[kBlockN], u[kBlockN], v[kBlockN];
      uint16_t rounded[kBlockN];
      finish_row(&gate, gate_columns, r, w.sums + offset, g);
      finish_row(&up, up_columns, r, up_sums + offset, u);
      apply_gate(e->gate, g, u, v);
      for (int i = 0; i < kBlockN; ++i) rounded[i] = float_to_bf16(v[i]);
      memcpy(e->inner + (routed->first + r) * gate.problem.n + gate_columns.first, rounded,
             size_t(gate_columns.count) * 2);
    }
  }
}

// total[token] += weight * (down . inner) for the rows of one expert; total is [tokens][columns of the blocks].
template <class I>
void down(const Experts* e, const Routed* routed, int64_t block_begin, int64_t block_end, float* total, void* scratch) {
  const Gemm p = matrix_of(&e->down, routed->expert, routed);
  const TaskMemory w = task_memory(p.plan, scratch);
  const int64_t width = (block_end - block_begin) * kBlockN;
  for (int64_t begin = 0; begin < p.problem.m; begin += e->tile_rows) {
    const Range at{begin, smaller(begin + e->tile_rows, p.problem.m), block_begin, block_end};
    const size_t block_bytes = size_t(at.row_end - begin) * kBlockN * 4;
    accumulate_blocks<I>(&p, at, w, w.sums, block_bytes);
    for (int64_t b = block_begin; b < block_end; ++b) {
      const Columns columns = columns_of<I>(&p, b);
      const uint8_t* sums = w.sums + size_t(b - block_begin) * block_bytes;
      for (int64_t r = begin; r < at.row_end; ++r, sums += kBlockN * 4) {
        float v[kBlockN];
        finish_row(&p, columns, r, sums, v);
        const float weight = e->weight[routed->first + r];
        float* const to = total + e->token[routed->first + r] * width + (b - block_begin) * kBlockN;
        for (int i = 0; i < kBlockN; ++i) to[i] += weight * v[i];
      }
    }
  }
}

// y = round(total * routed_scale + add * add_scale) for all tokens and some blocks of columns.
template <class I>
void store_rows(const Experts* e, int64_t block_begin, int64_t block_end, const float* total) {
  Gemm y = e->down.first;
  y.problem.dtype = e->tokens.problem.dtype;
  for (int64_t t = 0; t < e->tokens.problem.m; ++t)
    for (int64_t b = block_begin; b < block_end; ++b, total += kBlockN) {
      const int64_t column = b * kBlockN, count = smaller(kBlockN, y.problem.n - column);
      float v[kBlockN], add[kBlockN] = {};
      for (int i = 0; i < kBlockN; ++i) v[i] = total[i] * e->routed_scale;
      if (e->add) {
        to_floats<I>(element(e->add, y.problem.dtype, t * y.problem.n + column), y.problem.dtype, count, add);
        for (int i = 0; i < kBlockN; ++i) v[i] += add[i] * e->add_scale;
      }
      store_row<I>(v, &y, t, column, count);
    }
}

}  // namespace
