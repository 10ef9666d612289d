// The AMX driver on tiles in software, which trap where the processor would fault: so its configuration, strides and
// tails are tested on machines without AMX.
#include <math.h>

#include "amx-inl.h"
#include "scalar-panels-inl.h"
#include "table-inl.h"

namespace {

inline void require(bool condition) {
  if (!condition) __builtin_trap();
}

// The product ignores the floating-point environment: subnormals are zero on the way in and out.
inline float flush(float f) { return bits(f) & 0x7f800000 ? f : from_bits(bits(f) & 0x80000000); }

inline float flushed_fma(float a, float b, float c) {
  const float product = a * b;  // of two bf16: exact while it is a normal number
  const uint32_t exponent = bits(product) & 0x7f800000;
  return flush(exponent && exponent != 0x7f800000 ? product + c : fmaf(a, b, c));
}

class EmulatedTiles {
 public:
  void config(const TileConfig& c) {
    require(c.palette == 1 && c.start_row == 0);
    for (uint8_t byte : c.reserved) require(byte == 0);
    for (int i = 0; i < 16; ++i) {
      require(i < 8 ? c.rows[i] <= 16 && c.row_bytes[i] <= 64 : !c.rows[i] && !c.row_bytes[i]);
      require(!c.rows[i] == !c.row_bytes[i]);
    }
    config_ = c;
    memset(data_, 0, sizeof data_);
    on_ = true;
  }
  void release() { on_ = false; }
  template <int D>
  void zero() {
    present(D);
    memset(data_[D], 0, sizeof data_[D]);
  }
  template <int D>
  void load(const void* p, int64_t stride) {
    zero<D>();
    for (int r = 0; r < config_.rows[D]; ++r)
      memcpy(data_[D][r], static_cast<const uint8_t*>(p) + r * stride, config_.row_bytes[D]);
  }
  template <int D>
  void store(void* p, int64_t stride) {
    present(D);
    for (int r = 0; r < config_.rows[D]; ++r)
      memcpy(static_cast<uint8_t*>(p) + r * stride, data_[D][r], config_.row_bytes[D]);
  }
  template <int C, int A, int B>
  void dot_s8() {
    shapes(C, A, B);
    for (int m = 0; m < config_.rows[C]; ++m)
      for (int n = 0; n < config_.row_bytes[C] / 4; ++n) {
        uint32_t sum;  // wraps, as the instruction does
        memcpy(&sum, &data_[C][m][4 * n], 4);
        for (int k = 0; k < config_.row_bytes[A] / 4; ++k)
          for (int i = 0; i < 4; ++i) sum += uint32_t(int8_t(data_[A][m][4 * k + i]) * int8_t(data_[B][k][4 * n + i]));
        memcpy(&data_[C][m][4 * n], &sum, 4);
      }
  }

  // Even and odd products in two chains of fused multiply-adds from zero; their sum is added to the old value.
  template <int C, int A, int B>
  void dot_bf16() {
    shapes(C, A, B);
    for (int m = 0; m < config_.rows[C]; ++m) {
      float even[16] = {}, odd[16] = {};
      for (int k = 0; k < config_.row_bytes[A] / 4; ++k)
        for (int n = 0; n < config_.row_bytes[C] / 4; ++n) {
          even[n] = flushed_fma(element(A, m, 2 * k), element(B, k, 2 * n), even[n]);
          odd[n] = flushed_fma(element(A, m, 2 * k + 1), element(B, k, 2 * n + 1), odd[n]);
        }
      for (int n = 0; n < config_.row_bytes[C] / 4; ++n) {
        float sum;
        memcpy(&sum, &data_[C][m][4 * n], 4);
        sum = flush(flush(sum) + flush(even[n] + odd[n]));
        memcpy(&data_[C][m][4 * n], &sum, 4);
      }
    }
  }

 private:
  void present(int tile) const { require(on_ && config_.rows[tile]); }
  float element(int tile, int row, int column) const {
    uint16_t b;
    memcpy(&b, &data_[tile][row][2 * column], 2);
    return flush(bf16_to_float(b));
  }
  void shapes(int c, int a, int b) const {
    present(a), present(b), present(c);
    require(c != a && c != b && a != b && config_.row_bytes[a] % 4 == 0 && config_.row_bytes[b] % 4 == 0);
    require(config_.rows[c] == config_.rows[a] && config_.row_bytes[c] == config_.row_bytes[b]);
    require(config_.row_bytes[a] / 4 == config_.rows[b]);
  }

  TileConfig config_;
  bool on_ = false;
  alignas(64) uint8_t data_[8][16][64];
};

using AmxEmulated = AmxIsa<EmulatedTiles, ScalarPanels<Pairs, true>>;

}  // namespace

TILEWRIGHT_ISA(amx_emu, AmxEmulated)
