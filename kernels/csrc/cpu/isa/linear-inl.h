#pragma once
// y = x . w^T, the one driver of every instruction set. Included once per file, after `struct I` of that file.
//
// A task is some rows of x times some packed blocks of 32 columns. K is walked in chunks; a chunk of a block is brought
// into the form that the products read (its panel) once and used for all rows of the task; what a chunk gives is added
// to the sums [block][row][32] that `finish` turns into y. Where K is cut depends on the kind and K alone, so the
// result of a row depends neither on the other rows nor on the threads.
#include "activations-inl.h"

namespace {

// One chunk of one packed block, ready to be multiplied: `k_groups` runs of `k_group` columns of K.
struct Chunk {
  const uint8_t* weights;      // as packed
  const uint8_t* panel;        // in the form that the products read, or null where they decode themselves
  const uint8_t* ahead;        // as packed, what to ask for while `weights` are read; `weights` where nothing
  const uint8_t* next;         // as packed, the chunk that this thread reads next
  int64_t k_group, k_groups;   //
  int64_t columns;             // k_group * k_groups, or less in the last chunk
  int64_t k_group_bytes;       // from one k_group to the next: as packed,
  int64_t k_group_panel;       // bytes of the panel,
  int64_t k_group_units;       // units of the activations
  int64_t unit;                // first 4-byte unit of each packed row of activations
  bool first;                  // no chunk came before: the sums are undefined
  float* scale;                // [k_groups][32] or null (1); a copy
  bool compact;                // int4: bf16 scales lie before each k_group, and are not in `scale` yet
  const int8_t* zeros;         // [k_groups][32], int4
  const int32_t* sums;         // row_sums at the first k_group, or null; rows are sums_per_row apart
  const float* row_scale;      // row_scale at the first k_group, where there is one for each group of columns, or null
  int64_t index, scale_shift;  // of the first k_group in a row; log2 of the k_groups that share a scale of the row
  void* sum;                   // [rows of the task][32] fp32, or int32 for int8 with one scale for each row
};

// What some rows of int8 activations add to the products of a chunk.
struct RowTerms {
  const int32_t* sums;  // at the first k_group; rows are `sums_stride` apart
  int64_t sums_stride;
  const float* scales;  // at the first k_group, or null; rows are `scales_stride` apart
  int64_t scales_stride, index, scale_shift;

  int32_t sum(int64_t row, int64_t group) const { return sums[row * sums_stride + group]; }
  const float* scale_at(int64_t row, int64_t group) const {
    return scales + row * scales_stride + ((index + group) >> scale_shift) - (index >> scale_shift);
  }
  float scale(int64_t row, int64_t group) const { return *scale_at(row, group); }
};

inline RowTerms row_terms(const GemmPlan& plan, const Chunk& c, int64_t row) {
  return {c.sums + row * plan.sums_per_row,
          plan.sums_per_row,
          c.row_scale ? c.row_scale + row * plan.scales_per_row : nullptr,
          plan.scales_per_row,
          c.index,
          c.scale_shift};
}

inline int64_t weight_bytes(const Gemm* p, int64_t columns) {  // of a block, with what follows each int4 group
  switch (p->problem.kind) {
    case Kind::bf16:
      return columns * kBlockN * 2;
    case Kind::fp8:
    case Kind::int8:
      return columns * kBlockN;
    case Kind::mxfp4:
      return columns * kMxfp4Bytes / kMxfp4Columns;
    default:
      return columns / p->problem.group * (p->problem.group * 16 + (p->problem.compact ? kCompactScales : 128));
  }
}

inline const uint8_t* block_weights(const Gemm* p, int64_t block) {
  return p->problem.weight +
         block * (weight_bytes(p, p->problem.padded_k) + (p->problem.kind == Kind::int8 ? kBlockN * 4 : 0));
}

inline int64_t blocks_of(const GemmProblem& p) { return ceil_div(p.n, kBlockN); }

inline bool is_narrow(const Gemm* p, int64_t block) { return p->problem.stored_n - block * kBlockN < kBlockN; }

inline const uint8_t* weights_at(const Gemm* p, int64_t block, int64_t k0) {
  return block_weights(p, block) + weight_bytes(p, k0) / (is_narrow(p, block) ? 2 : 1);
}

inline const uint8_t* weights_end(const Gemm* p) {
  const int64_t last = blocks_of(p->problem) - 1;
  return weights_at(p, last, p->problem.padded_k);
}

// A last block of 16 rows [pair][16][2], as one of 32 whose second half is zero.
inline const uint8_t* widen(const uint8_t* from, int64_t pairs, int64_t element, uint8_t* to) {
  const size_t half = size_t(element) * 32;
  for (int64_t i = 0; i < pairs; ++i) {
    memcpy(to + i * 2 * half, from + i * half, half);
    memset(to + i * 2 * half + half, 0, half);
  }
  return to;
}

struct TaskMemory {
  uint8_t* panel;  // decoded weights of one chunk of each joint block
  uint8_t* wide;   // widened weights, likewise
  float* scale;    // [k_groups][32], likewise
  uint8_t* sums;   // [blocks of the task][rows of the task][32] x 4 bytes
  size_t bytes;    // of all of them
};

inline TaskMemory task_memory(const GemmPlan& plan, void* scratch) {
  uint8_t* const start = static_cast<uint8_t*>(scratch);
  TaskMemory w;
  w.panel = start;
  w.wide = w.panel + plan.n_blocks_per_pass * plan.chunk * kBlockN * 4;
  w.scale = reinterpret_cast<float*>(w.wide + plan.n_blocks_per_pass * plan.chunk * kBlockN * 2);
  w.sums = reinterpret_cast<uint8_t*>(w.scale + plan.n_blocks_per_pass * plan.chunk / plan.k_group * kBlockN);
  w.bytes = size_t(w.sums - start) + size_t(plan.task_blocks * plan.task_rows * kBlockN) * 4;
  return w;
}

// What of it the i-th of the joint blocks uses.
inline TaskMemory pass_memory(const GemmPlan& plan, TaskMemory w, int64_t i) {
  w.panel += i * plan.chunk * kBlockN * 4;
  w.wide += i * plan.chunk * kBlockN * 2;
  w.scale += i * plan.chunk / plan.k_group * kBlockN;
  return w;
}

// What stands for the zero points of a chunk of compact int4, of which there are 16 groups at most.
struct Eights {
  int8_t zero[16 * kBlockN];
};
constexpr Eights eights() {
  Eights e{};
  for (int8_t& zero : e.zero) zero = 8;
  return e;
}
constexpr Eights kEights = eights();

// Brings the scales of the f-th k_group of compact int4 to fp32. Where there is no panel, once its turn comes: so
// memory is read in order.
inline void compact_scales(const Chunk& c, int64_t f) {
  if (!c.compact) return;
  uint16_t halves[kBlockN];
  memcpy(halves, c.weights + f * c.k_group_bytes - kCompactScales, sizeof halves);
  for (int n = 0; n < kBlockN; ++n) c.scale[f * kBlockN + n] = bf16_to_float(halves[n]);
}

// The same for the g-th group of mxfp4. Through copies, so that the loop becomes vector code.
inline void mxfp4_scales(const Chunk& c, int64_t g) {
  uint8_t bytes[kBlockN];
  uint32_t powers[kBlockN];
  memcpy(bytes, c.weights + g / 2 * kMxfp4Bytes + g % 2 * kBlockN, sizeof bytes);
  for (int n = 0; n < kBlockN; ++n) {
    const uint32_t byte = bytes[n];
    powers[n] = byte << 23 | (byte == 255 ? 0x00400000 : 0) | (byte == 0 ? 0x00400000 : 0);
  }
  memcpy(c.scale + g * kBlockN, powers, sizeof powers);
}

// The weights and scales of the chunk at column k0 of a block, whose decoding asks for weights `ahead` bytes on.
template <class I>
Chunk chunk_of(const Gemm* p, int64_t block, int64_t k0, bool panel, int64_t ahead, const TaskMemory& w) {
  const bool narrow = is_narrow(p, block);
  Chunk c{};
  c.columns = smaller(p->plan.chunk, p->problem.padded_k - k0);
  c.k_group = p->plan.k_group;
  c.k_groups = ceil_div(c.columns, c.k_group);
  const bool words = has_int16_activations<I>(p->problem.kind);
  const int64_t columns_of_unit = has_int8_activations(p->problem.kind) ? 4 : I::kFloatUnits && !words ? 1 : 2;
  c.k_group_bytes = weight_bytes(p, c.k_group);
  c.k_group_units = c.k_group / columns_of_unit;
  c.k_group_panel = c.k_group_units * kBlockN * 4;
  c.first = k0 == 0;
  c.unit = k0 / columns_of_unit;
  c.weights = weights_at(p, block, k0);
  c.ahead = c.weights + smaller(ahead, weights_end(p) - c.weights - weight_bytes(p, c.columns) / (narrow ? 2 : 1));
  if (narrow) c.ahead = c.weights = widen(c.weights, c.columns / 2, p->problem.kind == Kind::bf16 ? 2 : 1, w.wide);
  c.index = k0 / c.k_group;
  c.scale_shift = p->plan.scale_shift;
  if (p->memory.row_sums) c.sums = p->memory.row_sums + c.index;
  if (p->problem.activation_group || words) c.row_scale = p->memory.row_scale + (c.index >> p->plan.scale_shift);
  if (p->problem.kind == Kind::fp8) {
    c.scale = w.scale;
    const float* scale = p->problem.scale + block * kBlockN / 128 * ceil_div(p->problem.k, 128) + k0 / 128;
    for (int64_t i = 0; i < c.k_groups * kBlockN; ++i) c.scale[i] = scale[i / kBlockN];
  } else if (p->problem.group) {
    const int64_t groups = p->problem.padded_k / p->problem.group, g = k0 / p->problem.group;
    c.scale = w.scale;
    c.compact = p->problem.compact;
    if (c.compact) {
      c.zeros = kEights.zero;
      for (int64_t f = 0; panel && f < c.k_groups; ++f) compact_scales(c, f);
      c.compact = !panel;
    } else {
      const size_t bytes = size_t(c.k_groups * kBlockN) * sizeof(float);
      memcpy(c.scale, p->problem.scale + (block * groups + g) * kBlockN, bytes);
      c.zeros = p->problem.zeros + (block * groups + g) * kBlockN;
    }
  }
  if (words) {
    c.scale = w.scale;
    for (int64_t g = 0; panel && g < c.k_groups; ++g) mxfp4_scales(c, g);
  }
  I::scale_weights(p->problem.kind, c);
  const bool as_packed = (p->problem.kind == Kind::int8 && !(I::kBiasedInt8 && p->problem.activation_group)) ||
                         (p->problem.kind == Kind::bf16 && !I::kFloatUnits);  // is its own panel
  if (as_packed)
    c.panel = c.weights;
  else if (panel)
    c.panel = I::panel(p->problem.kind, c, w.panel);
  return c;
}

// The f-th k_group of a chunk, as a chunk of its own.
inline Chunk k_group_of(const Chunk& chunk, int64_t f) {
  Chunk group = chunk;
  group.weights += f * chunk.k_group_bytes;
  if (chunk.panel) group.panel += f * chunk.k_group_panel;
  group.columns = smaller(chunk.k_group, chunk.columns - f * chunk.k_group);
  group.k_groups = 1;
  group.unit += f * chunk.k_group_units;
  group.first = chunk.first && f == 0;
  if (chunk.scale) group.scale += f * kBlockN;
  compact_scales(chunk, f);
  if (chunk.zeros) group.zeros += f * kBlockN;
  if (chunk.sums) group.sums += f;
  group.index += f;
  if (chunk.row_scale) group.row_scale += (group.index >> chunk.scale_shift) - (chunk.index >> chunk.scale_shift);
  return group;
}

template <class I>
void store_row(const float* v, const Gemm* p, int64_t row, int64_t column, int64_t count) {
  const int64_t at = row * p->problem.n + column;
  if (p->problem.dtype == Float::f32) {
    memcpy(static_cast<float*>(p->problem.y) + at, v, size_t(count) * 4);
    return;
  }
  uint16_t out[kBlockN];
  if (p->problem.dtype == Float::bf16)
    for (int i = 0; i < kBlockN; ++i) out[i] = float_to_bf16(v[i]);
  else
    I::floats_to_halves(v, out, kBlockN);
  uint16_t* const y = static_cast<uint16_t*>(p->problem.y) + at;
  if (count == kBlockN)
    memcpy(y, out, sizeof out);  // of a constant size: one store, not a call
  else
    memcpy(y, out, size_t(count) * 2);
}

// What turns the sums of one block into values: column scales of int8, bias.
struct Columns {
  int64_t first, count;  // columns of y
  float scale[kBlockN], bias[kBlockN];
  int32_t correction[kBlockN];
};

template <class I>
Columns columns_of(const Gemm* p, int64_t block) {
  Columns c{};
  c.first = block * kBlockN;
  c.count = smaller(kBlockN, p->problem.n - c.first);
  if (p->problem.bias) memcpy(c.bias, p->problem.bias + c.first, size_t(c.count) * 4);
  if (p->problem.kind == Kind::int8) {
    memcpy(c.scale, p->problem.scale + c.first, size_t(c.count) * 4);
    // The file holds 128 * sum_k w for activations stored as q + 128.
    if (I::kBiasedInt8 && !p->problem.activation_group)
      memcpy(c.correction, block_weights(p, block) + p->problem.padded_k * kBlockN, sizeof c.correction);
  }
  return c;
}

// The sums of one row and block -> values in fp32; products are rounded apart.
inline void finish_row(const Gemm* p, const Columns& c, int64_t row, const void* sums, float* v) {
  const bool by_group = p->problem.activation_group;  // the sums have taken up the scales of the row
  if (p->problem.kind == Kind::int8 && by_group) {
    const float* sum = static_cast<const float*>(sums);
    for (int i = 0; i < kBlockN; ++i) v[i] = sum[i] * c.scale[i];
  } else if (p->problem.kind == Kind::int8) {
    const int32_t* sum = static_cast<const int32_t*>(sums);
    const float row_scale = p->memory.row_scale[row];
    for (int i = 0; i < kBlockN; ++i)
      v[i] = float(int32_t(uint32_t(sum[i]) - uint32_t(c.correction[i]))) * row_scale * c.scale[i];
  } else {
    const float* sum = static_cast<const float*>(sums);
    const float row_scale = p->problem.kind == Kind::int4_int8 && !by_group ? p->memory.row_scale[row] : 1.0f;
    for (int i = 0; i < kBlockN; ++i) v[i] = sum[i] * row_scale;
  }
  if (p->problem.bias)
    for (int i = 0; i < kBlockN; ++i) v[i] += c.bias[i];
}

// The chunk that a thread reads after the one of a block at column k0: of the next block in the pass, of the next
// columns, or of the blocks behind the range; itself where there is none.
inline const uint8_t* next_chunk(const Gemm* p, const Range& at, int64_t block, int64_t place, int64_t k0) {
  const int64_t next = block + p->plan.n_blocks_per_pass, later = k0 + p->plan.chunk;
  if (next < at.block_end) return weights_at(p, next, k0);
  if (later < p->problem.padded_k) return weights_at(p, at.block_begin + place, later);
  const int64_t behind = at.block_end + place;
  return behind < blocks_of(p->problem) ? weights_at(p, behind, 0) : weights_at(p, block, k0);
}

// Sums [block of the range][row of the range][32], `block_bytes` from block to block.
template <class I>
void accumulate(I& multiplier, const Gemm* p, const Range& at, const TaskMemory& w, uint8_t* sums, size_t block_bytes) {
  const int64_t rows = at.row_end - at.row_begin, ahead = rows <= p->plan.rows ? p->plan.weights_ahead : 0;
  for (int64_t k0 = 0; k0 < p->problem.padded_k; k0 += p->plan.chunk)
    for (int64_t first = at.block_begin; first < at.block_end; first += p->plan.n_blocks_per_pass) {
      const int64_t count = smaller(p->plan.n_blocks_per_pass, at.block_end - first);
      Chunk c[I::kMaxBlocksPerPass];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t b = first + i;
        c[i] = chunk_of<I>(p, b, k0, I::needs_panel(rows), ahead, pass_memory(p->plan, w, i));
        c[i].next = next_chunk(p, at, b, i, k0);
        c[i].sum = sums + size_t(b - at.block_begin) * block_bytes;
      }
      multiplier.multiply(c, int(count), at.row_begin, at.row_end);
    }
}

template <class I>
void compute(const Gemm* p, int64_t begin, int64_t end, void* scratch) {
  const TaskMemory w = task_memory(p->plan, scratch);
  const size_t block_bytes = size_t(p->plan.task_rows) * kBlockN * 4;
  I multiplier(p);
  for (int64_t task = begin; task < end; ++task) {
    Range at;
    at.row_begin = task / p->plan.block_tasks * p->plan.task_rows;
    at.row_end = smaller(at.row_begin + p->plan.task_rows, p->problem.m);
    at.block_begin = task % p->plan.block_tasks * p->plan.task_blocks;
    at.block_end = smaller(at.block_begin + p->plan.task_blocks, blocks_of(p->problem));
    accumulate(multiplier, p, at, w, w.sums, block_bytes);
    for (int64_t b = at.block_begin; b < at.block_end; ++b) {
      const Columns c = columns_of<I>(p, b);
      const uint8_t* sums = w.sums + size_t(b - at.block_begin) * block_bytes;
      for (int64_t r = at.row_begin; r < at.row_end; ++r, sums += kBlockN * 4) {
        float v[kBlockN];
        finish_row(p, c, r, sums, v);
        store_row<I>(v, p, r, c.first, c.count);
      }
    }
  }
}

// Blocks of a task, so that threads have two tasks or more where there are so many, and are done at about the same
// time.
inline int64_t even_blocks(int64_t blocks, int64_t row_tasks, int64_t threads, int64_t most) {
  const auto time = [&](int64_t count) { return ceil_div(ceil_div(blocks, count) * row_tasks, threads) * count; };
  most = larger(1, smaller(most, blocks * row_tasks / (2 * threads)));
  int64_t least = time(most);
  for (int64_t count = 1; count < most; ++count) least = smaller(least, time(count));
  while (time(most) * 16 > least * 17) --most;
  return most;
}

template <class I>
GemmPlan plan(const GemmProblem* problem, int32_t threads, const Blocking* blocking) {
  const GemmProblem& p = *problem;
  GemmPlan g{};
  const bool words = has_int16_activations<I>(p.kind), integers = has_int8_activations(p.kind);
  g.rows = integers || words ? I::kIntRows : I::kFloatRows;
  g.unit_span = I::span(p.kind, p.group);
  const int64_t columns_of_unit = integers ? 4 : I::kFloatUnits && !words ? 1 : 2;
  g.units = round_up(p.padded_k / columns_of_unit, g.unit_span);
  g.activation_bytes = size_t(p.m * g.units) * 4;
  const int64_t most = integers || words ? blocking->int8_chunk : blocking->bf16_chunk;
  const int64_t l1_k_block = blocking->l1_k_bytes / (integers ? 1 : 2);
  const bool panel = I::needs_panel(p.m), scaled = p.group || p.activation_group || p.kind == Kind::fp8 || words;
  // Where sums go on from those of the last k_group, cuts change no bits; without a panel they also save no space.
  const int64_t unscaled = I::kChained && !panel ? p.padded_k : most;
  g.k_group = p.kind == Kind::fp8 ? 128
              : words             ? kMxfp4Group
              : p.group           ? p.group
              : scaled            ? p.activation_group
                                  : unscaled;
  // Where weights have groups, those of the activations are no smaller.
  while (p.activation_group > g.k_group << g.scale_shift) ++g.scale_shift;
  g.scales_per_row = p.activation_group || words ? ceil_div(p.padded_k, g.k_group << g.scale_shift) : integers;
  const bool takes_off_zeros =
      p.kind == Kind::int4_int8 || (p.kind == Kind::int8 && p.activation_group && I::kBiasedInt8);
  g.sums_per_row = takes_off_zeros ? ceil_div(p.padded_k, g.k_group) : 0;
  // Without a panel a chunk takes no space: as many k_groups as there may be share the cost of setting it up.
  const int64_t k_groups = panel ? most / g.k_group : ceil_div(p.padded_k, g.k_group);
  g.chunk = g.k_group * larger(1, smaller(k_groups, I::kMaxKGroups));
  g.l1_k_block = scaled ? round_up(l1_k_block, g.k_group) : l1_k_block;
  g.n_blocks_per_pass = smaller(blocking->n_blocks_per_pass, I::kMaxBlocksPerPass);
  const int64_t blocks = blocks_of(p), all_rows = round_up(p.m, g.rows);
  g.streams = int64_t(g.activation_bytes) <= blocking->streaming_bytes;
  g.task_rows = g.streams ? all_rows : smaller(all_rows, round_up(blocking->task_rows, g.rows));
  g.row_tasks = ceil_div(p.m, g.task_rows);
  const int64_t most_blocks = !g.streams ? blocking->task_blocks : p.m > g.rows ? g.n_blocks_per_pass : 1;
  g.task_blocks = even_blocks(blocks, g.row_tasks, threads, most_blocks);
  g.block_tasks = ceil_div(blocks, g.task_blocks);
  g.weights_ahead = blocking->weights_ahead;
  g.prepare_bytes = size_t(g.units + p.padded_k + 16) * 4;
  g.task_bytes = task_memory(g, nullptr).bytes;
  return g;
}

}  // namespace
