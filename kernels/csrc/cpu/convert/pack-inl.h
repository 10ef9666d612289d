// Packed layouts of docs/format.md: blocks of 32 rows, word column by word column. A tile of rows is copied into the
// first-level cache first; there it is padded, and turned with strides that the compiler knows.
#include "../isa/scalar-inl.h"
#include "table.h"

namespace {

constexpr int64_t kTileBytes = 256;  // of each row

// Bytes [begin, begin + width) of the 32 rows of a block; what lies beyond the matrix is zero.
inline void load_tile(const Words& w, int64_t block, int64_t begin, int64_t width, uint8_t* tile) {
  const int64_t blocks = ceil_div(w.n, kBlockN), part = block / blocks, row0 = block % blocks * kBlockN;
  const int64_t there = begin < w.row_bytes ? smaller(width, w.row_bytes - begin) : 0;
  for (int64_t r = 0; r < kBlockN; ++r) {
    uint8_t* out = tile + r * kTileBytes;
    const bool inside = row0 + r < w.n;
    if (inside) memcpy(out, w.data + (part * w.n + row0 + r) * w.row_bytes + begin, size_t(there));
    if (!inside || there < width) memset(out + (inside ? there : 0), 0, size_t(width - (inside ? there : 0)));
  }
}

template <class Word>
void turn_tile(const uint8_t* __restrict tile, int64_t width, uint8_t* __restrict out) {
  for (int64_t k = 0; k < width; k += int64_t(sizeof(Word)))
    for (int64_t r = 0; r < kBlockN; ++r)
      memcpy(out + k * kBlockN + r * sizeof(Word), tile + r * kTileBytes + k, sizeof(Word));
}

inline void add_codes(const uint8_t* __restrict tile, int64_t width, int32_t* __restrict sums) {
  for (int64_t r = 0; r < kBlockN; ++r) {
    int32_t sum = 0;
    for (int64_t k = 0; k < width; ++k) sum += int8_t(tile[r * kTileBytes + k]);
    sums[r] += sum;
  }
}

void pack_words(const Words* p, int64_t begin, int64_t end, uint8_t* out) {
  const Words& w = *p;
  const int64_t block_bytes = kBlockN * (w.padded_bytes + (w.compensation ? 4 : 0));
  uint8_t tile[kBlockN * kTileBytes];
  for (int64_t block = begin; block < end; ++block) {
    uint8_t* at = out + block * block_bytes;
    int32_t sums[kBlockN] = {};
    for (int64_t k = 0; k < w.padded_bytes; k += kTileBytes) {
      const int64_t width = smaller(kTileBytes, w.padded_bytes - k);
      load_tile(w, block, k, width, tile);
      if (w.word == 2) turn_tile<uint16_t>(tile, width, at + k * kBlockN);
      if (w.word == 4) turn_tile<uint32_t>(tile, width, at + k * kBlockN);
      if (w.compensation) add_codes(tile, width, sums);
    }
    if (!w.compensation) continue;
    for (int32_t& sum : sums) sum *= 128;
    memcpy(at + kBlockN * w.padded_bytes, sums, sizeof sums);
  }
}

// The 32 rows of one block of columns: rows n and n + 8 of each 16 in one byte, then the sums of code - zero.
inline void pack_int4_block(const uint8_t* __restrict tile, int64_t block_k, const int32_t* zeros,
                            uint8_t* __restrict out) {
  for (int64_t k = 0; k < block_k; k += 4)
    for (int64_t half = 0; half < 2; ++half)
      for (int64_t i = 0; i < 8; ++i) {
        uint32_t low, high;
        memcpy(&low, tile + (half * 16 + i) * kTileBytes + k, 4);
        memcpy(&high, tile + (half * 16 + 8 + i) * kTileBytes + k, 4);
        const uint32_t both = low | high << 4;
        memcpy(out + k * 16 + half * 32 + i * 4, &both, 4);
      }
  int32_t sums[kBlockN] = {};
  add_codes(tile, block_k, sums);
  for (int64_t r = 0; r < kBlockN; ++r) sums[r] -= zeros[r] * int32_t(block_k);
  memcpy(out + block_k * 16, sums, sizeof sums);
}

void pack_int4(const Words* p, const uint8_t* zeros, int64_t block_k, int64_t group, int64_t begin, int64_t end,
               uint8_t* out) {
  const Words& w = *p;
  const int64_t row_blocks = ceil_div(w.n, kBlockN), column_blocks = ceil_div(w.row_bytes, block_k);
  const int64_t groups = ceil_div(w.row_bytes, group), block_bytes = block_k * 16 + 128;
  uint8_t tile[kBlockN * kTileBytes];
  for (int64_t block = begin; block < end; ++block) {
    const int64_t part = block / row_blocks, row0 = block % row_blocks * kBlockN, rows = smaller(kBlockN, w.n - row0);
    for (int64_t c = 0; c < column_blocks; ++c) {
      int32_t zero[kBlockN] = {};
      for (int64_t r = 0; r < rows; ++r) zero[r] = zeros[(part * w.n + row0 + r) * groups + c * block_k / group];
      load_tile(w, block, c * block_k, block_k, tile);
      const int64_t there = w.row_bytes - c * block_k;  // columns beyond stand for 0: the zero point
      for (int64_t r = 0; r < rows && there < block_k; ++r)
        memset(tile + r * kTileBytes + there, zero[r], size_t(block_k - there));
      pack_int4_block(tile, block_k, zero, out + (block * column_blocks + c) * block_bytes);
    }
  }
}

}  // namespace
