#pragma once
// y = x . w^T, the one driver of every instruction set. Included once per file, after `struct I` of that file.
//
// A task is some rows of x times some packed blocks of 32 columns. K is walked in chunks; a chunk of a block is brought
// into the form that the products read (its panel) once and used for all rows of the task; what a chunk gives is folded
// into the sums [block][row][32] that `finish` turns into y. Where K is cut depends on the kind and K alone, so the
// result of a row depends neither on the other rows nor on the threads.
#include "activations-inl.h"

namespace {

// One chunk of one packed block, ready to be multiplied: `folds` runs of `fold` columns of K.
struct Chunk {
  const uint8_t* weights;  // as packed
  const uint8_t* panel;    // in the form that the products read, or null where they decode themselves
  const uint8_t* ahead;    // as packed, what to ask for while `weights` are read; `weights` where nothing
  const uint8_t* next;     // as packed, the chunk that this thread reads next
  int64_t fold, folds;     //
  int64_t columns;         // fold * folds, or less in the last chunk
  int64_t fold_bytes;      // from fold to fold: as packed,
  int64_t fold_panel;      // bytes of the panel,
  int64_t fold_units;      // units of the activations
  int64_t unit;            // first 4-byte unit of each packed row of activations
  bool first;              // no chunk came before: the sums are undefined
  float* scale;            // [folds][32] or null (1); a copy
  const int8_t* zeros;     // [folds][32], int4
  const int32_t* sums;     // int4_int8: row_sums at the first group; rows are padded_k/group apart
  void* sum;               // [rows of the task][32] fp32, or int32 for int8
};

inline int64_t weight_bytes(const Linear* p, int64_t columns) {  // of a block, with what follows each int4 group
  switch (p->kind) {
    case Kind::bf16:
      return columns * kBlockN * 2;
    case Kind::fp8:
    case Kind::int8:
      return columns * kBlockN;
    default:
      return columns / p->group * (p->group * 16 + 128);
  }
}

inline const uint8_t* block_weights(const Linear* p, int64_t block) {
  return p->weight + block * (weight_bytes(p, p->padded_k) + (p->kind == Kind::int8 ? kBlockN * 4 : 0));
}

inline bool is_narrow(const Linear* p, int64_t block) { return p->stored_n - block * kBlockN < kBlockN; }

inline const uint8_t* weights_at(const Linear* p, int64_t block, int64_t k0) {
  return block_weights(p, block) + weight_bytes(p, k0) / (is_narrow(p, block) ? 2 : 1);
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

struct Workspace {
  uint8_t* panel;  // decoded weights of one chunk of each joint block
  uint8_t* wide;   // widened weights, likewise
  float* scale;    // [folds][32], likewise
  uint8_t* sums;   // [blocks of the task][rows of the task][32] x 4 bytes
  size_t bytes;    // of all of them
};

inline Workspace workspace(const Linear* p, void* scratch) {
  uint8_t* const start = static_cast<uint8_t*>(scratch);
  Workspace w;
  w.panel = start;
  w.wide = w.panel + p->joint_blocks * p->chunk * kBlockN * 4;
  w.scale = reinterpret_cast<float*>(w.wide + p->joint_blocks * p->chunk * kBlockN * 2);
  w.sums = reinterpret_cast<uint8_t*>(w.scale + p->joint_blocks * p->chunk / p->fold * kBlockN);
  w.bytes = size_t(w.sums - start) + size_t(p->task_blocks * p->task_rows * kBlockN) * 4;
  return w;
}

// What of it the i-th of the joint blocks uses.
inline Workspace workspace_of(const Linear* p, Workspace w, int64_t i) {
  w.panel += i * p->chunk * kBlockN * 4;
  w.wide += i * p->chunk * kBlockN * 2;
  w.scale += i * p->chunk / p->fold * kBlockN;
  return w;
}

// The weights and scales of the chunk at column k0 of a block, whose decoding asks for weights `ahead` bytes on.
template <class I>
Chunk chunk_of(const Linear* p, int64_t block, int64_t k0, bool panel, int64_t ahead, const Workspace& w) {
  const bool narrow = is_narrow(p, block);
  Chunk c{};
  c.columns = smaller(p->chunk, p->padded_k - k0);
  c.fold = p->fold;
  c.folds = ceil_div(c.columns, c.fold);
  const int64_t columns_of_unit = has_int8_activations(p->kind) ? 4 : I::kFloatUnits ? 1 : 2;
  c.fold_bytes = weight_bytes(p, c.fold);
  c.fold_units = c.fold / columns_of_unit;
  c.fold_panel = c.fold_units * kBlockN * 4;
  c.first = k0 == 0;
  c.unit = k0 / columns_of_unit;
  c.weights = weights_at(p, block, k0);
  c.ahead = c.weights + ahead;
  if (narrow) c.weights = widen(c.weights, c.columns / 2, p->kind == Kind::bf16 ? 2 : 1, w.wide);
  if (p->kind == Kind::fp8) {
    c.scale = w.scale;
    const float* scale = p->scale + block * kBlockN / 128 * ceil_div(p->k, 128) + k0 / 128;
    for (int64_t i = 0; i < c.folds * kBlockN; ++i) c.scale[i] = scale[i / kBlockN];
  } else if (p->group) {
    const int64_t groups = p->padded_k / p->group, g = k0 / p->group;
    c.scale = w.scale;
    memcpy(c.scale, p->scale + (block * groups + g) * kBlockN, size_t(c.folds * kBlockN) * sizeof(float));
    c.zeros = p->zeros + (block * groups + g) * kBlockN;
    c.sums = p->row_sums + g;
  }
  I::scale_weights(p->kind, c);
  const bool as_packed = p->kind == Kind::int8 || (p->kind == Kind::bf16 && !I::kFloatUnits);  // is its own panel
  if (as_packed)
    c.panel = c.weights;
  else if (panel)
    c.panel = I::panel(p->kind, c, w.panel);
  return c;
}

// The f-th fold of a chunk, as a chunk of its own.
inline Chunk fold_of(const Chunk& chunk, int64_t f) {
  Chunk fold = chunk;
  fold.weights += f * chunk.fold_bytes;
  if (chunk.panel) fold.panel += f * chunk.fold_panel;
  fold.columns = smaller(chunk.fold, chunk.columns - f * chunk.fold);
  fold.folds = 1;
  fold.unit += f * chunk.fold_units;
  fold.first = chunk.first && f == 0;
  if (chunk.scale) fold.scale += f * kBlockN;
  if (chunk.zeros) fold.zeros += f * kBlockN;
  if (chunk.sums) fold.sums += f;
  return fold;
}

template <class I>
void store_row(const float* v, const Linear* p, int64_t row, int64_t column, int64_t count) {
  const int64_t at = row * p->n + column;
  if (p->dtype == Float::f32) {
    memcpy(static_cast<float*>(p->y) + at, v, size_t(count) * 4);
    return;
  }
  uint16_t out[kBlockN];
  if (p->dtype == Float::bf16)
    for (int i = 0; i < kBlockN; ++i) out[i] = float_to_bf16(v[i]);
  else
    I::floats_to_halves(v, out, kBlockN);
  uint16_t* const y = static_cast<uint16_t*>(p->y) + at;
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
Columns columns_of(const Linear* p, int64_t block) {
  Columns c{};
  c.first = block * kBlockN;
  c.count = smaller(kBlockN, p->n - c.first);
  if (p->bias) memcpy(c.bias, p->bias + c.first, size_t(c.count) * 4);
  if (p->kind == Kind::int8) {
    memcpy(c.scale, p->scale + c.first, size_t(c.count) * 4);
    // The file holds 128 * sum_k w for activations stored as q + 128.
    if (I::kBiasedInt8) memcpy(c.correction, block_weights(p, block) + p->padded_k * kBlockN, sizeof c.correction);
  }
  return c;
}

// The sums of one row and block -> values in fp32; products are rounded apart.
inline void finish_row(const Linear* p, const Columns& c, int64_t row, const void* sums, float* v) {
  if (p->kind == Kind::int8) {
    const int32_t* sum = static_cast<const int32_t*>(sums);
    const float row_scale = p->row_scale[row];
    for (int i = 0; i < kBlockN; ++i)
      v[i] = float(int32_t(uint32_t(sum[i]) - uint32_t(c.correction[i]))) * row_scale * c.scale[i];
  } else {
    const float* sum = static_cast<const float*>(sums);
    const float row_scale = p->kind == Kind::int4_int8 ? p->row_scale[row] : 1.0f;
    for (int i = 0; i < kBlockN; ++i) v[i] = sum[i] * row_scale;
  }
  if (p->bias)
    for (int i = 0; i < kBlockN; ++i) v[i] += c.bias[i];
}

// Sums [block of the range][row of the range][32], `block_bytes` from block to block.
template <class I>
void accumulate(I& multiplier, const Linear* p, const Range& at, const Workspace& w, uint8_t* sums,
                size_t block_bytes) {
  const int64_t rows = at.row_end - at.row_begin, ahead = rows <= p->rows ? p->weights_ahead : 0;
  for (int64_t k0 = 0; k0 < p->padded_k; k0 += p->chunk)
    for (int64_t first = at.block_begin; first < at.block_end; first += p->joint_blocks) {
      const int64_t count = smaller(p->joint_blocks, at.block_end - first);
      Chunk c[I::kJointBlocks];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t b = first + i, next = b + p->joint_blocks;
        c[i] = chunk_of<I>(p, b, k0, I::needs_panel(rows), ahead, workspace_of(p, w, i));
        c[i].next = next < at.block_end           ? weights_at(p, next, k0)
                    : k0 + p->chunk < p->padded_k ? weights_at(p, at.block_begin + i, k0 + p->chunk)
                                                  : weights_at(p, at.block_end + i, 0);
        c[i].sum = sums + size_t(b - at.block_begin) * block_bytes;
      }
      multiplier.multiply(c, int(count), at.row_begin, at.row_end);
    }
}

template <class I>
void compute(const Linear* p, int64_t begin, int64_t end, void* scratch) {
  const Workspace w = workspace(p, scratch);
  const size_t block_bytes = size_t(p->task_rows) * kBlockN * 4;
  I multiplier(p);
  for (int64_t task = begin; task < end; ++task) {
    Range at;
    at.row_begin = task / p->block_tasks * p->task_rows;
    at.row_end = smaller(at.row_begin + p->task_rows, p->m);
    at.block_begin = task % p->block_tasks * p->task_blocks;
    at.block_end = smaller(at.block_begin + p->task_blocks, ceil_div(p->n, kBlockN));
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
void plan(Linear* p, const Blocking* blocking) {
  const bool integers = has_int8_activations(p->kind);
  p->rows = integers ? I::kIntRows : I::kFloatRows;
  p->unit_span = I::span(p->kind, p->group);
  p->units = round_up(integers ? p->padded_k / 4 : I::kFloatUnits ? p->padded_k : p->padded_k / 2, p->unit_span);
  p->activation_bytes = size_t(p->m * p->units) * 4;
  const int64_t most = integers ? blocking->int8_chunk : blocking->bf16_chunk;
  const int64_t turn = blocking->turn / (integers ? 1 : 2);
  const bool panel = I::needs_panel(p->m), scaled = p->group || p->kind == Kind::fp8;
  // Where a fold goes on from the sums of the last one, cuts change no bits; without a panel they also save no space.
  const int64_t unscaled = I::kChained && !panel ? p->padded_k : most;
  p->fold = p->kind == Kind::fp8 ? 128 : scaled ? p->group : unscaled;
  // Without a panel a chunk takes no space: as many folds as there may be share the cost of setting it up.
  const int64_t folds = panel ? most / p->fold : ceil_div(p->padded_k, p->fold);
  p->chunk = p->fold * larger(1, smaller(folds, I::kMaxFolds));
  p->turn = scaled ? round_up(turn, p->fold) : turn;
  p->joint_blocks = smaller(blocking->joint_blocks, I::kJointBlocks);
  const int64_t blocks = ceil_div(p->n, kBlockN), all_rows = round_up(p->m, p->rows);
  p->streams = int64_t(p->activation_bytes) <= blocking->streaming_bytes;
  p->task_rows = p->streams ? all_rows : smaller(all_rows, round_up(blocking->task_rows, p->rows));
  p->row_tasks = ceil_div(p->m, p->task_rows);
  const int64_t most_blocks = !p->streams ? blocking->task_blocks : p->m > p->rows ? p->joint_blocks : 1;
  p->task_blocks = even_blocks(blocks, p->row_tasks, p->threads, most_blocks);
  p->block_tasks = ceil_div(blocks, p->task_blocks);
  p->weights_ahead = blocking->weights_ahead;
  p->prepare_bytes = size_t(p->units + p->padded_k + 16) * 4;
  p->task_bytes = workspace(p, nullptr).bytes;
}

}  // namespace
