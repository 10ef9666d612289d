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
  static constexpr int kMaxFolds = 8;
  static constexpr bool kFloatUnits = false, kBiasedInt8 = false, kRowSums = false;
  static constexpr bool kChained = true;
  // Tile loads that miss the first-level cache (48 KiB) hold up the products: 16 KiB of weights stay there while as
  // much of each group of activations passes by, asked for in time.
  static constexpr Blocking kBlocking{.bf16_chunk = 256,
                                      .int8_chunk = 512,
                                      .streaming_bytes = 1 << 19,
                                      .task_rows = 256,
                                      .task_blocks = 4,
                                      .weights_ahead = 4096,
                                      .steps_ahead = 2};

  // A tile row of activations is 64 bytes; 32 where a group of int4 weights is no longer than that.
  static int64_t span(Kind kind, int64_t group) { return kind == Kind::int4_int8 && group == 32 ? 8 : 16; }
  static bool needs_panel(int64_t) { return true; }

  explicit AmxIsa(const Linear* p)
      : p_(p), step_bytes_(p->unit_span * 4), step_columns_(p->unit_span * (has_int8_activations(p->kind) ? 4 : 2)) {}
  ~AmxIsa() {
    if (configured_) tiles_.release();
  }

  void multiply(const Chunk& c, int64_t row_begin, int64_t row_end) {
    const int64_t groups = ceil_div(row_end - row_begin, kGroupRows);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t row = row_begin + g * kGroupRows;
      const int rows = rows_of(row);
      configure(rows);
      Pass pass = pass_of(c, row, rows, g, groups);
      pass.a_next = activations_at(row + kGroupRows < row_end ? row + kGroupRows : row_begin, c.unit);
      uint8_t* const sum = static_cast<uint8_t*>(c.sum) + g * kGroupRows * kSumRow;
      if (rows > kTileRows)
        run<2>(c, pass, sum, rows);
      else
        run<1>(c, pass, sum, rows);
    }
    if (p_->kind == Kind::int4_int8)
      fold_rows<true>(kGroupRows);
    else
      fold_rows<false>(kGroupRows);
  }

 private:
  // What the steps of one group of rows read, and what they ask for meanwhile.
  struct Pass {
    const uint8_t* a;        // activations
    int64_t advance;         // their bytes from step to step
    bool full;               // whether activations are asked for
    const uint8_t* a_ahead;  // from here on, for `until` steps, and then
    int64_t until;           //
    const uint8_t* a_next;   // from here on: the next group
    const uint8_t* near;     // weights to bring to the first-level cache, `near_lines` in each step
    int64_t near_lines;      //
    const uint8_t* far;      // weights to bring to the second-level cache, `far_lines` in each step
    int64_t far_lines;       //
  };

  int rows_of(int64_t row) const { return int(smaller(kGroupRows, p_->m - row)); }

  const uint8_t* activations_at(int64_t row, int64_t unit) const {
    return reinterpret_cast<const uint8_t*>(p_->activations + row * p_->units + rows_of(row) * unit);
  }

  // Weights that are read once are asked for a fixed number of bytes ahead. Where several groups read them, the first
  // one fetches them from the second-level cache, and each asks memory for its share of the next chunk.
  Pass pass_of(const Chunk& c, int64_t row, int rows, int64_t group, int64_t groups) const {
    const int64_t steps = ceil_div(c.columns, step_columns_), step_weights = step_bytes_ * kBlockN;
    const int64_t steps_ahead = smaller(p_->steps_ahead, steps);
    Pass pass{};
    pass.a = activations_at(row, c.unit);
    pass.advance = rows * step_bytes_;
    pass.full = steps_ahead && pass.advance == kGroupRows * 64;
    pass.a_ahead = pass.a + steps_ahead * pass.advance;
    pass.until = steps - steps_ahead;
    if (c.panel == c.weights && group == 0) {
      const int64_t ahead = groups == 1 ? p_->weights_ahead : steps_ahead * step_weights;
      pass.near = c.weights + ahead;
      pass.near_lines = ahead ? step_weights / 64 : 0;
    }
    if (groups > 1 && p_->weights_ahead) {
      pass.far_lines = ceil_div(weight_bytes(p_, c.columns), 64 * groups * steps);
      pass.far = c.next + group * steps * pass.far_lines * 64;
    }
    return pass;
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

  template <int G>
  void run(const Chunk& c, Pass& pass, uint8_t* sum, int rows) {
    if (p_->kind == Kind::int8)
      in_place<G, true>(c, pass, sum);
    else if (p_->kind == Kind::bf16)
      in_place<G, false>(c, pass, sum);
    else if (p_->kind == Kind::int4_int8)
      scaled<G, true>(c, pass, sum, rows);
    else
      scaled<G, false>(c, pass, sum, rows);
  }

  // Without scales the tiles take up the sums where the last chunk left them.
  template <int G, bool kInt8>
  void in_place(const Chunk& c, Pass& pass, uint8_t* sum) {
    if (c.first)
      zero_sums<G>();
    else
      load_sums<G>(sum);
    accumulate<G, kInt8, false>(c.panel, c.columns, pass);
    store_sums<G>(sum);
  }

  // With scales every fold starts at zero, and the sums take up its part while the tiles multiply the next fold.
  template <int G, bool kInt8>
  void scaled(const Chunk& c, Pass& pass, uint8_t* sum, int rows) {
    for (int64_t f = 0; f < c.folds; ++f) {
      const int64_t columns = smaller(c.fold, c.columns - f * c.fold);
      zero_sums<G>();
      accumulate<G, kInt8, true>(c.panel + f * c.fold * kBlockN * (kInt8 ? 1 : 2), columns, pass);
      fold_rows<kInt8>(kGroupRows);
      other_part_ = !other_part_;
      store_sums<G>(parts_[other_part_]);
      part_ = {parts_[other_part_], sum, c.scale + f * kBlockN, c.first && f == 0, 0, rows};
    }
  }

  // The part of the last fold, of which `row` rows have been added to the sums.
  struct Part {
    const uint8_t* from;
    uint8_t* sum;
    const float* scale;
    bool first;  // the sums are undefined
    int row, rows;
  };

  // sum += part * scale for up to `count` more rows; product and sum are rounded apart.
  template <bool kInt8>
  void fold_rows(int count) {
    const Part part = part_;
    if (part.row == part.rows) return;
    const int end = int(smaller(part.row + count, part.rows));
    for (int half = 0; half < 2; ++half) {
      const FloatLanes scale = reinterpret_cast<const FloatLanes*>(part.scale)[half];
      for (int r = part.row; r < end; ++r) {
        const uint8_t* const from = part.from + r * kSumRow + half * 64;
        FloatLanes* const s = reinterpret_cast<FloatLanes*>(part.sum + r * kSumRow) + half;
        FloatLanes value;
        if constexpr (kInt8)
          value = __builtin_convertvector(*reinterpret_cast<const IntLanes*>(from), FloatLanes);
        else
          value = *reinterpret_cast<const FloatLanes*>(from);
        *s = (part.first ? FloatLanes{} : *s) + value * scale;
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

  template <int G, bool kInt8, bool kFolds>
  void accumulate(const uint8_t* w, int64_t columns, Pass& pass) {
    const int64_t step_weights = step_bytes_ * kBlockN;
    int64_t k = 0;
    for (; k + step_columns_ <= columns; k += step_columns_, w += step_weights) one_step<G, kInt8, kFolds>(w, pass);
    if (k < columns) {  // half a step of int8: what follows the weights in memory must not be read
      alignas(64) uint8_t last[kTileRows * 128] = {};
      memcpy(last, w, size_t(columns - k) * kBlockN);
      one_step<G, kInt8, kFolds>(last, pass);
    }
  }

  // Asks for cache lines to come to the first level.
  template <int kLines>
  [[gnu::always_inline]] static void ask(const uint8_t* from) {
    if constexpr (kLines > 0) {
      ask<kLines - 1>(from);
      __builtin_prefetch(from + (kLines - 1) * 64);
    }
  }

  template <int G, bool kInt8, bool kFolds>
  void one_step(const uint8_t* w, Pass& pass) {
    const uint8_t* const a = pass.a;
    tiles_.template load<6>(w, 128);
    tiles_.template load<4>(a, step_bytes_);
    tiles_.template load<7>(w + 64, 128);
    dot<0, 4, 6, kInt8>();
    if constexpr (G == 2) tiles_.template load<5>(a + kTileRows * step_bytes_, step_bytes_);
    dot<1, 4, 7, kInt8>();
    pass.a = a + pass.advance;
    if (pass.full) {
      if (pass.until-- == 0) pass.a_ahead = pass.a_next;
      ask<kGroupRows>(pass.a_ahead);
      pass.a_ahead += kGroupRows * 64;
    }
    if constexpr (G == 2) {
      dot<2, 5, 6, kInt8>();
      dot<3, 5, 7, kInt8>();
    }
    if constexpr (kFolds) fold_rows<kInt8>(kInt8 ? kGroupRows / 2 : kGroupRows / 4);  // a fold has 2 or 4 steps
    for (int64_t i = 0; i < pass.near_lines; i += kTileRows) ask<kTileRows>(pass.near + i * 64);
    for (int64_t i = 0; i < pass.far_lines; ++i) __builtin_prefetch(pass.far + i * 64, 0, 2);
    pass.near += pass.near_lines * 64;
    pass.far += pass.far_lines * 64;
  }

  template <int C, int A, int B, bool kInt8>
  void dot() {
    if constexpr (kInt8)
      tiles_.template dot_s8<C, A, B>();
    else
      tiles_.template dot_bf16<C, A, B>();
  }

  const Linear* p_;
  Tiles tiles_;
  const int64_t step_bytes_, step_columns_;  // of a row of a tile of activations; of K
  bool configured_ = false;
  int rows_ = 0;
  Part part_{};
  bool other_part_ = false;
  alignas(64) uint8_t parts_[2][kGroupRows * kSumRow];
};

}  // namespace
