#pragma once
// Products on AMX tiles, written once against tile operations: the hardware's, or a software model of them.
//
// A group of up to 32 rows times a block of 32 columns: sums in tiles 0-3, activations in 4 and 5, weights in 6 and 7.
#include "linear-inl.h"

namespace {

// Operand of LDTILECFG.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "LDTILECFG reads 64 bytes");

constexpr int kTileRows = 16;
constexpr int kGroupRows = 2 * kTileRows;  // packed together: one step of them is 2 KiB side by side
constexpr int64_t kSumRow = kBlockN * 4;   // bytes of one row of sums

typedef float FloatLanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(64), aligned(4), may_alias));

template <class Tiles, class Panels>
class AmxIsa : public Panels {
 public:
  static constexpr int kFloatRows = kGroupRows, kIntRows = kGroupRows;
  static constexpr int kMaxKGroups = 8;
  static constexpr bool kFloatUnits = false, kBiasedInt8 = false;
  static constexpr bool kChained = true, kInt16 = false;
  static constexpr int64_t kMaxBlocksPerPass = 2;  // at most
  // Tiles that come from the second-level cache take about three times as long as their products, and where two virtual
  // processors share a core, each has half of the first level (48 KiB) and of the second. So two groups of rows take
  // turns on a block: a cycle touches 20 KiB, 8 of activations, 4 of weights and 8 of sums, and brings 12 of them from
  // the second level for 4 steps. With two joint blocks it would touch 32 KiB and bring 16 for 8 steps.
  static constexpr Blocking kBlocking{.bf16_chunk = 512,
                                      .int8_chunk = 1024,
                                      .streaming_bytes = 1 << 19,
                                      .task_rows = 256,
                                      .task_blocks = 8,
                                      .weights_ahead = 4096,
                                      .l1_k_bytes = 512,
                                      .n_blocks_per_pass = 1};

  // A tile row of activations is 64 bytes; 32 where a group of int4 weights is no longer than that.
  static int64_t span(Kind kind, int64_t group) { return kind == Kind::int4_int8 && group == 32 ? 8 : 16; }
  static bool needs_panel(int64_t rows) { return rows > kGroupRows; }

  explicit AmxIsa(const Gemm* p)
      : p_(p),
        step_bytes_(p->plan.unit_span * 4),
        step_columns_(p->plan.unit_span * (has_int8_activations(p->problem.kind) ? 4 : 2)) {}
  ~AmxIsa() {
    if (configured_) tiles_.release();
  }

  void multiply(const Chunk* chunks, int count, int64_t row_begin, int64_t row_end) {
    if (p_->problem.kind == Kind::int4_int8 && row_end - row_begin <= kFewRows) {
      for (int b = 0; b < count; ++b) int4_rows<kFewRows>(row_end - row_begin, chunks[b], row_begin);
      return;
    }
    const int64_t groups = ceil_div(row_end - row_begin, kGroupRows);
    Ahead ahead[kMaxBlocksPerPass];
    for (int b = 0; b < count; ++b) ahead[b] = ahead_of(chunks[b], groups);
    for (int64_t row = row_begin, pair; row < row_end; row += pair * kGroupRows) {
      pair = row_end - row >= 2 * kGroupRows ? 2 : 1;
      const int64_t columns = chunks[0].columns,
                    step = pair == 2 && p_->plan.l1_k_block ? p_->plan.l1_k_block : columns;
      for (int64_t k = 0; k < columns; k += step)
        for (int b = 0; b < count; ++b)
          for (int64_t r = row; r < row + pair * kGroupRows; r += kGroupRows) {
            uint8_t* const sum = static_cast<uint8_t*>(chunks[b].sum) + (r - row_begin) * kSumRow;
            run({chunks[b], k, smaller(step, columns - k), r, rows_of(r), sum}, ahead[b]);
          }
    }
    if (has_int8_activations(p_->problem.kind))
      add_scaled_rows<true>(kGroupRows);
    else
      add_scaled_rows<false>(kGroupRows);
  }

 private:
  static constexpr int kFewRows = 8;  // so many rows of int4_int8 go through vector registers: the same integers

  // Some columns of one chunk for one group of rows.
  struct KBlock {
    const Chunk& c;
    int64_t column, columns;
    int64_t row;
    int rows;
    uint8_t* sum;
  };

  // What the steps ask for meanwhile: addresses, since the last step may count on beyond the weights.
  struct Ahead {
    uintptr_t near;      // weights to bring to the first-level cache, `near_lines` in each step
    int64_t near_lines;  //
    uintptr_t far;       // weights to bring to the second-level cache, `far_lines` in each step
    int64_t far_lines;   //
  };

  int rows_of(int64_t row) const { return int(smaller(kGroupRows, p_->problem.m - row)); }

  const uint32_t* activations_at(int64_t row, int64_t unit) const {
    return p_->memory.activations + row * p_->plan.units + rows_of(row) * unit;
  }

  // Weights that are read once are asked for a fixed number of bytes ahead. Where several groups read them, each asks
  // memory for its share of the next chunk.
  Ahead ahead_of(const Chunk& c, int64_t groups) const {
    Ahead ahead{};
    if (!p_->plan.weights_ahead) return ahead;
    if (groups > 1) {
      ahead.far = reinterpret_cast<uintptr_t>(c.next);
      ahead.far_lines = ceil_div(weight_bytes(p_, c.columns), 64 * groups * ceil_div(c.columns, step_columns_));
    } else if (c.panel == c.weights) {
      ahead.near = reinterpret_cast<uintptr_t>(c.ahead);
      ahead.near_lines = step_bytes_ * kBlockN / 64;
    }
    return ahead;
  }

  template <int R>
  void int4_rows(int64_t rows, const Chunk& c, int64_t row) const {
    if (rows != R) {
      if constexpr (R > 1) int4_rows<R - 1>(rows, c, row);
      return;
    }
    Panels::template multiply_int4<R>(c, activations_at(row, c.unit), p_->plan.unit_span, row_terms(p_->plan, c, row));
  }

  void configure(int rows) {
    if (rows == rows_) return;
    TileConfig config;
    const auto tile = [&](int index, int count, int64_t bytes) {
      config.rows[index] = uint8_t(count);
      config.row_bytes[index] = uint16_t(count ? bytes : 0);
    };
    const int rows0 = int(smaller(rows, kTileRows)), rows1 = rows - rows0, depth = int(step_bytes_ / 4);
    tile(0, rows0, 64), tile(1, rows0, 64), tile(4, rows0, step_bytes_);
    tile(2, rows1, 64), tile(3, rows1, 64), tile(5, rows1, step_bytes_);
    tile(6, depth, 64), tile(7, depth, 64);
    tiles_.config(config);
    configured_ = true;
    rows_ = rows;
  }

  void run(const KBlock& t, Ahead& ahead) {
    configure(t.rows);
    const int64_t unit = has_int8_activations(p_->problem.kind) ? t.column / 4 : t.column / 2;
    a_ = reinterpret_cast<const uint8_t*>(activations_at(t.row, t.c.unit + unit));
    advance_ = step_bytes_ * t.rows;
    if (t.rows > kTileRows)
      run_kind<2>(t, ahead);
    else
      run_kind<1>(t, ahead);
  }

  template <int G>
  void run_kind(const KBlock& t, Ahead& ahead) {
    if (p_->problem.kind == Kind::int8 && t.c.row_scale)
      scaled<G, true>(t, ahead);
    else if (p_->problem.kind == Kind::int8)
      in_place<G, true>(t, ahead);
    else if (p_->problem.kind == Kind::bf16 || p_->problem.kind == Kind::mxfp4)
      in_place<G, false>(t, ahead);
    else if (p_->problem.kind == Kind::int4_int8)
      scaled<G, true>(t, ahead);
    else
      scaled<G, false>(t, ahead);
  }

  // Without scales the tiles take up the sums where the last block of K left them.
  template <int G, bool kInt8>
  void in_place(const KBlock& t, Ahead& ahead) {
    if (t.c.first && t.column == 0)
      zero_sums<G>();
    else
      load_sums<G>(t.sum);
    if (t.c.panel)
      accumulate<G, kInt8, false>(t.c, t.column, t.columns, ahead);
    else
      decode_and_accumulate<G, kInt8, false>(t.c, t.column, t.columns, ahead);
    store_sums<G>(t.sum);
  }

  // With scales every k_group starts at zero, and the sums take up its part while the tiles multiply the next one.
  template <int G, bool kInt8>
  void scaled(const KBlock& t, Ahead& ahead) {
    const Chunk& c = t.c;
    for (int64_t k = t.column, end = k + t.columns; k < end; k += c.k_group) {
      zero_sums<G>();
      if (c.panel)
        accumulate<G, kInt8, true>(c, k, smaller(c.k_group, end - k), ahead);
      else
        decode_and_accumulate<G, kInt8, true>(c, k, smaller(c.k_group, end - k), ahead);
      add_scaled_rows<kInt8>(kGroupRows);
      other_part_ = !other_part_;
      store_sums<G>(parts_[other_part_]);
      const int64_t group = k / c.k_group;
      compact_scales(c, group);
      part_ = {parts_[other_part_],
               t.sum,
               c.scale ? c.scale + group * kBlockN : nullptr,
               nullptr,
               c.first && k == 0,
               0,
               t.rows};
      if (c.row_scale) part_.row_scale = row_terms(p_->plan, c, t.row).scale_at(0, group);
    }
  }

  // The part of the last k_group, of which `row` rows have been added to the sums.
  struct Part {
    const uint8_t* from;
    uint8_t* sum;
    const float* scale;      // of the columns, or null
    const float* row_scale;  // of the first row, or null; rows are scales_per_row apart
    bool first;              // the sums are undefined
    int row, rows;
  };

  // sum += part * scale for up to `count` more rows; product and sum are rounded apart, but for scales of the rows.
  template <bool kInt8>
  void add_scaled_rows(int count) {
    const Part part = part_;
    if (part.row == part.rows) return;
    const int end = int(smaller(part.row + count, part.rows));
    for (int half = 0; half < 2; ++half) {
      const FloatLanes scale = part.scale ? reinterpret_cast<const FloatLanes*>(part.scale)[half] : FloatLanes{} + 1.0f;
      for (int r = part.row; r < end; ++r) {
        const uint8_t* const from = part.from + r * kSumRow + half * 64;
        FloatLanes* const s = reinterpret_cast<FloatLanes*>(part.sum + r * kSumRow) + half;
        FloatLanes value;
        if constexpr (kInt8)
          value = __builtin_convertvector(*reinterpret_cast<const IntLanes*>(from), FloatLanes);
        else
          value = *reinterpret_cast<const FloatLanes*>(from);
        const FloatLanes old = part.first ? FloatLanes{} : *s;
        if (part.row_scale)
          *s = Panels::multiply_add(value, scale * part.row_scale[r * p_->plan.scales_per_row], old);
        else
          *s = old + value * scale;
      }
    }
    part_.row = end;
  }

  template <int G>
  void zero_sums() {
    tiles_.template zero<0>();
    tiles_.template zero<1>();
    if constexpr (G == 2) tiles_.template zero<2>(), tiles_.template zero<3>();
  }
  template <int G>
  void load_sums(const uint8_t* sum) {
    tiles_.template load<0>(sum, kSumRow);
    tiles_.template load<1>(sum + 64, kSumRow);
    if constexpr (G == 2) {
      tiles_.template load<2>(sum + kTileRows * kSumRow, kSumRow);
      tiles_.template load<3>(sum + kTileRows * kSumRow + 64, kSumRow);
    }
  }
  template <int G>
  void store_sums(uint8_t* sum) {
    tiles_.template store<0>(sum, kSumRow);
    tiles_.template store<1>(sum + 64, kSumRow);
    if constexpr (G == 2) {
      tiles_.template store<2>(sum + kTileRows * kSumRow, kSumRow);
      tiles_.template store<3>(sum + kTileRows * kSumRow + 64, kSumRow);
    }
  }

  template <int G, bool kInt8, bool kScaled>
  void accumulate(const Chunk& c, int64_t k, int64_t columns, Ahead& ahead) {
    const int64_t step_weights = step_bytes_ * kBlockN, end = k + columns;
    const uint8_t* w = c.panel + k * kBlockN * (kInt8 ? 1 : 2);
    for (; k + step_columns_ <= end; k += step_columns_, w += step_weights) one_step<G, kInt8, kScaled>(w, ahead);
    if (k < end) {  // half a step of int8: what follows the weights in memory must not be read
      alignas(64) uint8_t last[kTileRows * 128] = {};
      memcpy(last, w, size_t(end - k) * kBlockN);
      one_step<G, kInt8, kScaled>(last, ahead);
    }
  }

  // Weights that a single group of rows reads are decoded one step before the tiles take them: the processor reads
  // memory, decodes and multiplies at the same time.
  template <int G, bool kInt8, bool kScaled>
  void decode_and_accumulate(const Chunk& c, int64_t k, int64_t columns, Ahead& ahead) {
    if (k == 0) Panels::decode(p_->problem.kind, c, 0, step_columns_, steps_[other_step_]);
    for (const int64_t end = k + columns; k < end; k += step_columns_) {
      const uint8_t* const w = steps_[other_step_];
      other_step_ = !other_step_;
      const int64_t next = k + step_columns_;
      if (next < c.columns) Panels::decode(p_->problem.kind, c, next, step_columns_, steps_[other_step_]);
      one_step<G, kInt8, kScaled>(w, ahead);
    }
  }

  template <int G, bool kInt8, bool kScaled>
  void one_step(const uint8_t* w, Ahead& ahead) {
    const uint8_t* const a = a_;
    a_ += advance_;
    tiles_.template load<6>(w, 128);
    tiles_.template load<4>(a, step_bytes_);
    tiles_.template load<7>(w + 64, 128);
    dot<0, 4, 6, kInt8>();
    if constexpr (G == 2) tiles_.template load<5>(a + kTileRows * step_bytes_, step_bytes_);
    dot<1, 4, 7, kInt8>();
    if constexpr (G == 2) {
      dot<2, 5, 6, kInt8>();
      dot<3, 5, 7, kInt8>();
    }
    if constexpr (kScaled) add_scaled_rows<kInt8>(kInt8 ? kGroupRows / 2 : kGroupRows / 4);  // 2 or 4 steps each
    for (int64_t i = 0; i < ahead.near_lines; ++i)
      __builtin_prefetch(reinterpret_cast<const void*>(ahead.near + uintptr_t(i) * 64));
    for (int64_t i = 0; i < ahead.far_lines; ++i)
      __builtin_prefetch(reinterpret_cast<const void*>(ahead.far + uintptr_t(i) * 64), 0, 2);
    ahead.near += uintptr_t(ahead.near_lines) * 64;
    ahead.far += uintptr_t(ahead.far_lines) * 64;
  }

  template <int C, int A, int B, bool kInt8>
  void dot() {
    if constexpr (kInt8)
      tiles_.template dot_s8<C, A, B>();
    else
      tiles_.template dot_bf16<C, A, B>();
  }

  const Gemm* p_;
  Tiles tiles_;
  const int64_t step_bytes_, step_columns_;  // of a row of a tile of activations; of K
  bool configured_ = false;
  int rows_ = 0;
  const uint8_t* a_ = nullptr;  // activations of the next step
  int64_t advance_ = 0;         // their bytes from step to step
  Part part_{};
  bool other_part_ = false, other_step_ = false;
  alignas(64) uint8_t parts_[2][kGroupRows * kSumRow];
  alignas(64) uint8_t steps_[2][kTileRows * 128];
};

}  // namespace
