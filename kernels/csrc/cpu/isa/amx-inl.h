#pragma once
// Products on AMX tiles, written once against tile operations: the hardware's, or a software model of them.
//
// Two groups of up to 16 rows times a block of 32 columns: sums in tiles 0-3, activations in 4 and 5, weights in 6
// and 7.
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
constexpr int kPairRows = 2 * kTileRows;
constexpr int64_t kSumRow = kBlockN * 4;  // bytes of one row of sums
constexpr int kPartFolds = 4;             // of one chunk: their parts stay in the first-level cache

typedef float FloatLanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t IntLanes __attribute__((vector_size(64), aligned(4), may_alias));

template <class Tiles, class Panels>
class AmxIsa : public Panels {
 public:
  static constexpr int kFloatRows = kTileRows, kIntRows = kTileRows;
  static constexpr int kMaxFolds = kPartFolds;
  static constexpr bool kFloatUnits = false, kBiasedInt8 = false, kRowSums = false;
  static constexpr Blocking kBlocking{.bf16_chunk = 1024,
                                      .int8_chunk = 2048,
                                      .folds = kPartFolds,
                                      .streaming_bytes = 1 << 20,
                                      .task_rows = 256,
                                      .task_blocks = 8,
                                      .prefetch = 1};

  // A tile row of activations is 64 bytes; 32 where a group of int4 weights is no longer than that.
  static int64_t span(Kind kind, int64_t group) { return kind == Kind::int4_int8 && group == 32 ? 8 : 16; }
  static bool needs_panel(int64_t) { return true; }

  explicit AmxIsa(const Linear* p) : p_(p) {}
  ~AmxIsa() {
    if (configured_) tiles_.release();
  }

  void multiply(const Chunk& c, int64_t row_begin, int64_t row_end) {
    const int64_t pairs = ceil_div(row_end - row_begin, kPairRows);
    const int64_t lines = p_->prefetch ? ceil_div(weight_bytes(p_, c.columns), 64) : 0;
    const uint8_t* next = c.next;
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t r = row_begin + i * kPairRows;
      const int rows0 = int(smaller(kTileRows, row_end - r)), rows1 = int(smaller(kTileRows, row_end - r - rows0));
      configure(rows0, rows1);
      Pass pass{};
      pass.step_bytes = p_->unit_span * 4;
      pass.a0 = p_->activations + r * p_->units + rows0 * c.unit;
      pass.a1 = p_->activations + (r + rows0) * p_->units + rows1 * c.unit;
      pass.advance0 = rows0 * p_->unit_span;
      pass.advance1 = rows1 * p_->unit_span;
      // every pair of rows asks for its share of the next weights, spread over its steps
      const int64_t steps = ceil_div(c.columns, step_columns());
      pass.next = next;
      pass.lines = int(ceil_div(lines, pairs * steps));
      next += pass.lines * steps * 64;
      uint8_t* const sum = static_cast<uint8_t*>(c.sum) + i * kPairRows * kSumRow;
      if (rows1 > 0)
        run<2>(c, pass, sum, rows0 + rows1);
      else
        run<1>(c, pass, sum, rows0);
    }
  }

 private:
  // What the steps of one pair of row groups read.
  struct Pass {
    const uint32_t *a0, *a1;     // activations of the two groups
    int64_t advance0, advance1;  // their units from step to step
    int64_t step_bytes;          // of a row of a tile of activations
    const uint8_t* next;         // weights to ask for, `lines` cache lines in each step
    int lines;
  };

  int64_t step_columns() const { return p_->unit_span * (has_int8_activations(p_->kind) ? 4 : 2); }

  void configure(int rows0, int rows1) {
    const int row_bytes = int(p_->unit_span) * 4;
    if (configured_ && rows0 == rows_[0] && rows1 == rows_[1]) return;
    TileConfig config;
    const auto tile = [&](int index, int rows, int bytes) {
      config.rows[index] = uint8_t(rows);
      config.row_bytes[index] = uint16_t(rows ? bytes : 0);
    };
    tile(0, rows0, 64), tile(1, rows0, 64), tile(4, rows0, row_bytes);
    tile(2, rows1, 64), tile(3, rows1, 64), tile(5, rows1, row_bytes);
    tile(6, row_bytes / 4, 64), tile(7, row_bytes / 4, 64);
    tiles_.config(config);
    configured_ = true;
    rows_[0] = rows0;
    rows_[1] = rows1;
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
    accumulate<G, kInt8>(c.panel, c.columns, pass);
    store_sums<G>(sum);
  }

  // With scales every fold starts at zero; the sums take up all folds of the chunk in one go.
  template <int G, bool kInt8>
  void scaled(const Chunk& c, Pass& pass, uint8_t* sum, int rows) {
    alignas(64) uint8_t parts[kPartFolds][kPairRows * kSumRow];
    for (int64_t f = 0; f < c.folds; ++f) {
      zero_sums<G>();
      const int64_t columns = smaller(c.fold, c.columns - f * c.fold);
      accumulate<G, kInt8>(c.panel + f * c.fold * kBlockN * (kInt8 ? 1 : 2), columns, pass);
      store_sums<G>(parts[f]);
    }
    if (c.folds == kPartFolds)
      fold<kInt8, kPartFolds>(c, parts, sum, rows);
    else
      fold<kInt8, 0>(c, parts, sum, rows);
  }

  // sum += part * scale, fold after fold; product and sum are rounded apart.
  template <bool kInt8, int kFolds>
  static void fold(const Chunk& c, const uint8_t (&parts)[kPartFolds][kPairRows * kSumRow], uint8_t* sum, int rows) {
    const int64_t folds = kFolds ? kFolds : c.folds;
    for (int half = 0; half < 2; ++half)
      for (int r = 0; r < rows; ++r) {
        FloatLanes* const s = reinterpret_cast<FloatLanes*>(sum + r * kSumRow) + half;
        FloatLanes value = c.first ? FloatLanes{} : *s;
        for (int64_t f = 0; f < folds; ++f) {
          const FloatLanes scale = reinterpret_cast<const FloatLanes*>(c.scale + f * kBlockN)[half];
          const uint8_t* const part = parts[f] + r * kSumRow + half * 64;
          if constexpr (kInt8)
            value = value + __builtin_convertvector(*reinterpret_cast<const IntLanes*>(part), FloatLanes) * scale;
          else
            value = value + *reinterpret_cast<const FloatLanes*>(part) * scale;
        }
        *s = value;
      }
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

  template <int G, bool kInt8>
  void accumulate(const uint8_t* w, int64_t columns, Pass& pass) {
    const int64_t step = step_columns(), step_weights = pass.step_bytes * kBlockN;
    int64_t k = 0;
    for (; k + step <= columns; k += step, w += step_weights) one_step<G, kInt8>(w, pass);
    if (k < columns) {  // half a step of int8: what follows the weights in memory must not be read
      alignas(64) uint8_t last[kTileRows * 128] = {};
      memcpy(last, w, size_t(columns - k) * kBlockN);
      one_step<G, kInt8>(last, pass);
    }
  }

  template <int G, bool kInt8>
  void one_step(const uint8_t* w, Pass& pass) {
    tiles_.template load<6>(w, 128);
    tiles_.template load<4>(pass.a0, pass.step_bytes);
    tiles_.template load<7>(w + 64, 128);
    dot<0, 4, 6, kInt8>();
    if constexpr (G == 2) tiles_.template load<5>(pass.a1, pass.step_bytes);
    dot<1, 4, 7, kInt8>();
    for (int i = 0; i < pass.lines; ++i) __builtin_prefetch(pass.next + i * 64, 0, 2);
    pass.next += pass.lines * 64;
    if constexpr (G == 2) {
      dot<2, 5, 6, kInt8>();
      dot<3, 5, 7, kInt8>();
      pass.a1 += pass.advance1;
    }
    pass.a0 += pass.advance0;
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
  bool configured_ = false;
  int rows_[2] = {0, 0};
};

}  // namespace
