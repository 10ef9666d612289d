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

template <class Tiles, class Panels>
class AmxIsa : public Panels {
 public:
  static constexpr int kFloatRows = kTileRows, kIntRows = kTileRows;
  static constexpr bool kFloatUnits = false, kBiasedInt8 = false;
  static constexpr Blocking kBlocking{.bf16_chunk = 512, .int8_chunk = 1024, .task_rows = 256, .task_blocks = 8};

  // A tile row of activations is 64 bytes; 32 where a group of int4 weights is no longer than that.
  static int64_t span(Kind kind, int64_t group) { return kind == Kind::int4_int8 && group == 32 ? 8 : 16; }

  static bool needs_panel(int64_t) { return true; }

  explicit AmxIsa(const Linear* p) : p_(p) {}
  ~AmxIsa() {
    if (configured_) tiles_.release();
  }

  void multiply(const Chunk& c, int64_t row_begin, int64_t row_end) {
    for (int64_t r = row_begin; r < row_end; r += 2 * kTileRows) {
      const int rows0 = int(smaller(kTileRows, row_end - r)), rows1 = int(smaller(kTileRows, row_end - r - rows0));
      configure(rows0, rows1);
      if (rows1 > 0)
        on_groups<2>(c, r, row_begin, rows0, rows1);
      else
        on_groups<1>(c, r, row_begin, rows0, 0);
    }
  }

 private:
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

  // One or two groups of rows that begin at row r.
  template <int G>
  void on_groups(const Chunk& c, int64_t r, int64_t row_begin, int rows0, int rows1) {
    const uint32_t* a0 = p_->activations + r * p_->units + rows0 * c.unit;
    const uint32_t* a1 = p_->activations + (r + rows0) * p_->units + rows1 * c.unit;
    uint8_t* const sum = static_cast<uint8_t*>(c.sum) + (r - row_begin) * kBlockN * 4;
    alignas(64) uint8_t part[2 * kTileRows * kBlockN * 4];
    const bool in_place = !c.scale;  // nothing to scale: the tiles take up the sums where the last chunk left them
    if (in_place && !c.first)
      load_sums<G>(sum);
    else
      zero_sums<G>();
    if (p_->kind == Kind::int8)
      accumulate<G, Kind::int8>(c, a0, a1, rows0, rows1);
    else if (p_->kind == Kind::int4_int8)
      accumulate<G, Kind::int4_int8>(c, a0, a1, rows0, rows1);
    else
      accumulate<G, Kind::bf16>(c, a0, a1, rows0, rows1);
    store_sums<G>(in_place ? sum : part);
    if (!in_place) fold(c, part, reinterpret_cast<float*>(sum), r, rows0 + rows1);
  }

  template <int G>
  void zero_sums() {
    tiles_.template zero<0>();
    tiles_.template zero<1>();
    if constexpr (G == 2) tiles_.template zero<2>(), tiles_.template zero<3>();
  }
  template <int G>
  void load_sums(const uint8_t* sum) {
    tiles_.template load<0>(sum, 128);
    tiles_.template load<1>(sum + 64, 128);
    if constexpr (G == 2) {
      tiles_.template load<2>(sum + kTileRows * 128, 128);
      tiles_.template load<3>(sum + kTileRows * 128 + 64, 128);
    }
  }
  template <int G>
  void store_sums(uint8_t* sum) {
    tiles_.template store<0>(sum, 128);
    tiles_.template store<1>(sum + 64, 128);
    if constexpr (G == 2) {
      tiles_.template store<2>(sum + kTileRows * 128, 128);
      tiles_.template store<3>(sum + kTileRows * 128 + 64, 128);
    }
  }

  template <int G, Kind K>
  void accumulate(const Chunk& c, const uint32_t* a0, const uint32_t* a1, int rows0, int rows1) {
    const int64_t span = p_->unit_span, row_bytes = span * 4, columns = K == Kind::bf16 ? span * 2 : span * 4;
    const uint8_t* w = c.panel;
    int64_t k = 0;
    for (; k + columns <= c.columns; k += columns, w += span * 128, a0 += rows0 * span, a1 += rows1 * span)
      step<G, K>(w, a0, a1, row_bytes);
    if (k < c.columns) {  // half a step of int8: what follows the weights in memory must not be read
      alignas(64) uint8_t last[2048] = {};
      memcpy(last, w, size_t(c.columns - k) * kBlockN);
      step<G, K>(last, a0, a1, row_bytes);
    }
  }

  template <int G, Kind K>
  void step(const uint8_t* w, const uint32_t* a0, const uint32_t* a1, int64_t row_bytes) {
    tiles_.template load<6>(w, 128);
    tiles_.template load<7>(w + 64, 128);
    tiles_.template load<4>(a0, row_bytes);
    dot<0, 4, 6, K>();
    dot<1, 4, 7, K>();
    if constexpr (G == 2) {
      tiles_.template load<5>(a1, row_bytes);
      dot<2, 5, 6, K>();
      dot<3, 5, 7, K>();
    }
  }

  template <int C, int A, int B, Kind K>
  void dot() {
    if constexpr (K == Kind::int8)
      tiles_.template dot_s8s8<C, A, B>();
    else if constexpr (K == Kind::int4_int8)
      tiles_.template dot_s8u8<C, A, B>();
    else
      tiles_.template dot_bf16<C, A, B>();
  }

  // sum += part * scale, for int4_int8 after the zero points; product and sum are rounded apart.
  void fold(const Chunk& c, const uint8_t* part, float* sum, int64_t first_row, int rows) {
    const int64_t groups = c.sums ? p_->padded_k / p_->group : 0;
    float scale[kBlockN];
    int32_t zeros[kBlockN] = {};
    memcpy(scale, c.scale, sizeof scale);
    if (p_->kind == Kind::int4_int8)
      for (int i = 0; i < kBlockN; ++i) zeros[i] = c.zeros[i];
    for (int r = 0; r < rows; ++r, part += kBlockN * 4, sum += kBlockN) {
      float value[kBlockN];
      if (p_->kind == Kind::int4_int8) {
        int32_t dot[kBlockN];
        memcpy(dot, part, sizeof dot);
        const int32_t row_sum = c.sums[(first_row + r) * groups];
        for (int i = 0; i < kBlockN; ++i) value[i] = float(dot[i] - zeros[i] * row_sum) * scale[i];
      } else {
        memcpy(value, part, sizeof value);
        for (int i = 0; i < kBlockN; ++i) value[i] *= scale[i];
      }
      for (int i = 0; i < kBlockN; ++i) sum[i] = (c.first ? 0.0f : sum[i]) + value[i];
    }
  }

  const Linear* p_;
  Tiles tiles_;
  bool configured_ = false;
  int rows_[2] = {0, 0};
};

}  // namespace
