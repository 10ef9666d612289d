// The plain C boundary between the operators (baseline flags, C++ library, torch) and the code that is compiled once
// for each instruction set: only plain data and function pointers cross it.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace tilewright {

constexpr int64_t kBlockN = 32;  // columns (output features) of one packed block

enum class Kind : int32_t {
  bf16,       // weight bf16
  fp8,        // weight e4m3fn, one fp32 scale for 128 x 128, activations bf16
  int4_bf16,  // weight int4 with zero points, one fp32 scale for 1 x group, activations bf16 (W4A16)
  int8,       // weight int8, one fp32 scale for each row, activations int8
  int4_int8,  // weight as int4_bf16, activations int8 (W4A8)
  mxfp4,      // weight e2m1, one power of two for 1 x 32, in blocks of 32 x 64 with their scales, activations bf16
};

// A block of mxfp4, as it lies in memory: scales [2][32], codes [8 units][32] of eight columns each.
constexpr int64_t kCompactScales = 64;  // bytes of scales before the codes of a block of compact int4
constexpr int64_t kMxfp4Columns = 64, kMxfp4Group = 32, kMxfp4Scales = 64, kMxfp4Bytes = 1088;

enum class Float : int32_t { f32, bf16, f16, e4m3 };  // e4m3 in block_amax alone

// y[m, n] = x[m, k] . w[n, k]^T (+ bias[n]): what the caller of an operator asked for. Nothing changes it.
struct GemmProblem {
  Kind kind;
  Float dtype;            // of x and y
  int64_t m, n, k;        // logical sizes
  const void* x;          // [m, k], rows `x_stride` elements apart
  int64_t x_stride;       //
  const uint8_t* weight;  // packed, docs/format.md
  int64_t stored_n;       // packed rows: n rounded up to 32, or to 16 where the last block has 16 rows
  int64_t padded_k;       // packed columns: k rounded up to 32, int4 to `group`, mxfp4 to 64
  int64_t group;          // int4: columns that share a scale; 0 otherwise
  bool compact;           // int4: symmetric, 32 bf16 scales before the codes of each block, `weight` behind the first
  int64_t activation_group;  // columns of x that share a scale, with int8 activations: 64 or 128; 0: the whole row
  int64_t rotation;          // columns of x that a Hadamard matrix multiplies before they are quantized; 0: none
  const float* scale;        // fp8 [ceil(n/128), ceil(k/128)]; int8 [stored_n]; int4 [blocks, k/group, 32]
  const int8_t* zeros;       // int4 [blocks, k/group, 32]
  const float* bias;         // [n] or null
  void* y;                   // [m, n], contiguous
};

// How an instruction set goes about a problem. Depends on the kind, sizes and number of threads; no result does.
struct GemmPlan {
  int64_t rows;               // rows of one group of activations: packed together, computed together
  int64_t unit_span;          // consecutive 4-byte units of one row that lie side by side in the packed activations
  int64_t units;              // 4-byte units of one packed row of activations
  int64_t k_group;            // columns of K whose products are summed before scales apply and the sum takes them up
  int64_t chunk;              // columns of K that are decoded together, a multiple of `k_group`
  int64_t l1_k_block;         // columns of K after which the next rows and blocks take their turn, as `k_group`
  int64_t task_rows;          // rows of one task, a multiple of `rows`
  int64_t task_blocks;        // packed blocks of one task
  int64_t row_tasks;          //
  int64_t block_tasks;        // tasks = row_tasks * block_tasks, rows outermost
  int64_t n_blocks_per_pass;  // packed blocks that are multiplied together, see Blocking
  bool streams;               // weights are read once, in file order: threads should keep to their runs of tasks
  int64_t weights_ahead;      // see Blocking
  int64_t scales_per_row;     // of the activations; 0 where they are bf16
  int64_t scale_shift;        // log2 of the k_groups that share one of them
  int64_t sums_per_row;       // of the activations; 0 where none are needed
  size_t activation_bytes;    // size of `activations`
  size_t task_bytes;          // scratch of one thread for compute
  size_t prepare_bytes;       // scratch of one thread for prepare
};

// Memory that the threads of a call share: what prepare writes and compute reads.
struct GemmWorkspace {
  uint32_t* activations;  // packed
  float* row_scale;       // [m, scales_per_row]
  int32_t* row_sums;      // [m, sums_per_row], sums of int8 activations over each group of columns
};

// Its size for so many rows, and its parts from an address on. `static`: each file that includes this has its own.
static inline size_t scale_bytes(const GemmPlan& plan, int64_t m) {
  return (size_t(m * plan.scales_per_row) * 4 + 63) / 64 * 64;
}
static inline size_t workspace_bytes(const GemmPlan& plan, int64_t m) {
  return (plan.activation_bytes + 63) / 64 * 64 + scale_bytes(plan, m) + size_t(m * plan.sums_per_row) * 4;
}
static inline GemmWorkspace workspace(const GemmPlan& plan, int64_t m, uint8_t* at) {
  GemmWorkspace w{};
  w.activations = reinterpret_cast<uint32_t*>(at);
  at += (plan.activation_bytes + 63) / 64 * 64;
  if (plan.scales_per_row) w.row_scale = reinterpret_cast<float*>(at);
  if (plan.sums_per_row) w.row_sums = reinterpret_cast<int32_t*>(at + scale_bytes(plan, m));
  return w;
}

struct Gemm {
  GemmProblem problem;
  GemmPlan plan;
  GemmWorkspace memory;
};

// How problems are cut for the caches. No field changes a result, but for the order of bf16 sums by the chunks where
// vector registers hold them.
struct Blocking {
  int64_t bf16_chunk;         // columns: a panel of them, and as many columns of a task's activations, stay in the
  int64_t int8_chunk;         // second-level cache while the rows pass by
  int64_t streaming_bytes;    // activations up to this size stay in the second-level cache whole: blocks go one by one
  int64_t task_rows;          // otherwise a task has so many rows, a chunk of whose activations stays there
  int64_t task_blocks;        // and so many blocks at most, which bounds its sums
  int64_t weights_ahead;      // bytes: how far before their use weights are asked for that are read once; 0: not at all
  int64_t l1_k_bytes;         // of a row of activations: so much of two groups of rows and of some blocks, and the sums
                              // of both, stay in the first-level cache; 0: no such blocks of K
  int64_t n_blocks_per_pass;  // blocks that take turns on them
};

struct Experts;  // experts.h
struct Routed;
struct Norm;       // norm.h
struct Attention;  // attention.h

// Some rows of x, from a multiple of `rows` on, times some packed blocks.
struct Range {
  int64_t row_begin, row_end, block_begin, block_end;
};

// One instruction set. All but plan may run on several threads at once, for disjoint ranges.
struct Isa {
  const char* name;
  const Blocking* blocking;
  GemmPlan (*plan)(const GemmProblem*, int32_t threads, const Blocking*);
  void (*prepare)(const Gemm*, int64_t row_begin, int64_t row_end, void* scratch);
  void (*compute)(const Gemm*, int64_t task_begin, int64_t task_end, void* scratch);
  // The steps of an expert layer, isa/experts-inl.h.
  void (*convert_rows)(const Experts*, int64_t token_begin, int64_t token_end, void* scratch);
  void (*gather_rows)(const Experts*, const Routed*, int64_t row_begin, int64_t row_end);
  void (*gate_up)(const Experts*, const Routed*, const Range*, void* scratch);
  void (*down)(const Experts*, const Routed*, int64_t block_begin, int64_t block_end, float* total, void* scratch);
  void (*store_rows)(const Experts*, int64_t block_begin, int64_t block_end, const float* total);
  void (*rms_norm)(const Norm*, int64_t row_begin, int64_t row_end, void* scratch);
  // The steps of attention over a cache, isa/attention-inl.h.
  void (*attend)(const Attention*, int64_t task_begin, int64_t task_end, void* scratch);
  void (*join_chunks)(const Attention*, int64_t head_begin, int64_t head_end);
};

}  // namespace tilewright
