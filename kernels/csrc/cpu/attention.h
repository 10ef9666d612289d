// What the operator of attention hands to the code of an instruction set: plain data, as in table.h.
#pragma once
#include "table.h"

namespace tilewright {

// Keys or values [batch, kv_heads, length, size]: rows of consecutive elements, so many elements apart.
struct Cached {
  const void* data;
  int64_t size, batch_stride, head_stride, stride;
};

// One query for each sequence and head: y = softmax(scale * q . keys) . values over all cached tokens. These are cut
// into chunks; each leaves its largest score, its sum of e^(score - largest) and its sum of these times the values.
struct Attention {
  Float dtype;                             // of everything but `parts`
  int64_t batch, heads, kv_heads, length;  // heads is a multiple of kv_heads
  const void* q;                           // [batch, heads, key.size], rows of consecutive elements
  int64_t q_batch_stride, q_stride;        //
  Cached key, value;                       //
  float scale;                             //
  int64_t chunk, chunks;                   // cached tokens of a chunk, of which the last may have fewer
  float* parts;                            // [batch, heads, chunks, value.size + 2]
  void* y;                                 // [batch, heads, value.size], contiguous

  int64_t group() const { return heads / kv_heads; }
  int64_t tasks() const { return batch * kv_heads * chunks; }
  int64_t part_size() const { return value.size + 2; }
};

// Scratch memory of one thread.
inline size_t attention_bytes(const Attention& p) {
  const int64_t row = p.key.size > p.value.size ? p.key.size : p.value.size;
  return size_t(p.group() * (p.key.size + p.chunk) + row) * 4;
}

}  // namespace tilewright
