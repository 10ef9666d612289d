// The plain C boundary between the conversion operators and the code that is compiled once for each instruction set.
#pragma once
#include "../table.h"

namespace tilewright {

enum class Code : int32_t { fp8, int8, int4 };  // int4 as 0..15 around 8, one in a byte

// Numbers [n, k], rows `stride` elements apart, and the blocks that share a scale. Partial blocks at the edges stand
// for themselves: nothing is padded.
struct Blocks {
  const void* data;
  Float dtype;
  int64_t n, k, stride;
  int64_t block_n, block_k;

  int64_t rows() const { return (n + block_n - 1) / block_n; }
  int64_t columns() const { return (k + block_k - 1) / block_k; }
};

// Rows of bytes to be packed: `parts` matrices of `n` rows one after the other, each padded to whole blocks of 32 rows.
struct Words {
  const uint8_t* data;   // [parts, n, row_bytes]
  int64_t parts, n;      //
  int64_t row_bytes;     //
  int64_t padded_bytes;  // of a row, a multiple of `word`
  int64_t word;          // bytes that stay together: 2 or 4
  bool compensation;     // the rows are int8 codes; 128 times their sum follows each block

  int64_t blocks() const { return parts * ((n + kBlockN - 1) / kBlockN); }
};

constexpr int64_t kMeasures = 7;  // of a block: see `code_errors`

// A quantized weight beside its source.
struct Comparison {
  Blocks weight;         // the source
  const uint8_t* codes;  // [n, k]
  const float* scales;   // [rows, columns]
  const float* ideal;    // [rows, columns], above zero: what the format's own rule gives for the source
  double* out;           // [rows, columns, kMeasures], zeros at first
};

// One instruction set. Functions work on the scale rows or blocks begin..end and may run on several threads for
// disjoint ranges. `scales` is [rows, columns].
struct Convert {
  // out[rows, columns] = largest magnitude of each block; infinite or NaN if the block holds such a number.
  void (*block_amax)(const Blocks*, int64_t begin, int64_t end, float* out);
  // codes[n, k] = nearest code of number / scale, ties to even, cut off at the largest codes.
  void (*encode)(const Blocks*, const float* scales, Code, int64_t begin, int64_t end, uint8_t* codes);
  // out[rows, columns] = sum over each block of (nearest(number / scale) * scale - number)^2, added up in halves.
  // `scratch` holds `error_scratch` floats.
  void (*squared_error)(const Blocks*, const float* scales, Code, int64_t begin, int64_t end, float* scratch,
                        float* out);
  // out[j] = codes[2j] | codes[2j + 1] << 4.
  void (*join_nibbles)(const uint8_t* codes, int64_t count, uint8_t* out);
  // The inverse, each nibble xor-ed with `flip`.
  void (*split_nibbles)(const uint8_t* joined, int64_t count, uint8_t flip, uint8_t* codes);
  // out[n, k] = code * scale in fp32; codes are `data`, of which only the stride counts in bytes; scales [rows,
  // columns] are indexed with (row0 + row) / block_n.
  void (*scale_codes)(const Blocks*, const float* scales, Code, int64_t row0, float* out);
  // Blocks begin..end of the layouts cpu-vnni-bf16, cpu-vnni-fp8 and cpu-vnni-int8.
  void (*pack_words)(const Words*, int64_t begin, int64_t end, uint8_t* out);
  // Blocks begin..end of cpu-vnni-int4; zeros [parts, n, ceil(row_bytes / group)].
  void (*pack_int4)(const Words*, const uint8_t* zeros, int64_t block_k, int64_t group, int64_t begin, int64_t end,
                    uint8_t* out);
  // For each block, sums of squares of code * scale - number, number, half a step under `ideal`, and
  // nearest(number / ideal) * ideal - number; how many numbers lie further than half a step from their code (less what
  // is cut off, and what a scale rounded to bf16 explains); the largest difference; the largest code.
  void (*code_errors)(const Comparison*, Code, int64_t begin, int64_t end);
};

// Floats that squared_error needs: one row of blocks after the sums along K, and one block row of errors.
inline int64_t error_scratch(const Blocks& b) { return b.block_n * b.columns() + b.block_k; }

}  // namespace tilewright
