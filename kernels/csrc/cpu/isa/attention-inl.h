#pragma once
// Attention of single queries over cached keys and values. A row of the cache is read once for all heads that share it.
#include "../attention.h"
#include "gates-inl.h"
#include "rows-inl.h"

namespace {

template <class I>
const float* cached_row(const Cached& c, Float dtype, int64_t offset, int64_t token, float* row) {
  to_floats<I>(element(c.data, dtype, offset + token * c.stride), dtype, c.size, row);
  return row;
}

struct Weights {
  float largest, sum;  // of the scores, and of what they became
};

// score[i] becomes e^(score[i] - largest), close to 0 if all are -inf: other chunks may have what counts.
inline Weights soften(float* score, int64_t count) {
  float largest = score[0], sum = 0;
  for (int64_t i = 1; i < count; ++i) largest = score[i] > largest ? score[i] : largest;
  const float top = largest < -3.4028235e38f ? 0.0f : largest;
  for (int64_t i = 0; i < count; ++i) score[i] = exponential(score[i] - top);
  for (int64_t i = 0; i < count; ++i) sum += score[i];
  return {largest, sum};
}

// One chunk of the tokens of one sequence, for the heads that share its keys and values.
template <class I>
void attend_chunk(const Attention* p, int64_t batch, int64_t kv_head, int64_t number, float* scratch) {
  const int64_t group = p->group(), first = number * p->chunk, count = smaller(p->chunk, p->length - first);
  float* const queries = scratch;                       // [group, key.size]
  float* const scores = queries + group * p->key.size;  // [group, chunk]
  float* const row = scores + group * p->chunk;
  for (int64_t g = 0; g < group; ++g) {
    const int64_t at = batch * p->q_batch_stride + (kv_head * group + g) * p->q_stride;
    to_floats<I>(element(p->q, p->dtype, at), p->dtype, p->key.size, queries + g * p->key.size);
  }
  const int64_t keys = batch * p->key.batch_stride + kv_head * p->key.head_stride;
  for (int64_t t = 0; t < count; ++t) {
    const float* const key = cached_row<I>(p->key, p->dtype, keys, first + t, row);
    for (int64_t g = 0; g < group; ++g)
      scores[g * p->chunk + t] = dot(queries + g * p->key.size, key, p->key.size) * p->scale;
  }
  float* const parts = p->parts + (batch * p->heads + kv_head * group) * p->chunks * p->part_size();
  const auto part = [&](int64_t g) { return parts + (g * p->chunks + number) * p->part_size(); };
  for (int64_t g = 0; g < group; ++g) {
    const Weights w = soften(scores + g * p->chunk, count);
    float* const out = part(g);
    out[0] = w.largest, out[1] = w.sum;
    memset(out + 2, 0, size_t(p->value.size) * 4);
  }
  const int64_t values = batch * p->value.batch_stride + kv_head * p->value.head_stride;
  for (int64_t t = 0; t < count; ++t) {
    const float* const value = cached_row<I>(p->value, p->dtype, values, first + t, row);
    for (int64_t g = 0; g < group; ++g) {
      const float weight = scores[g * p->chunk + t];
      float* const out = part(g) + 2;
      for (int64_t i = 0; i < p->value.size; ++i) out[i] += weight * value[i];
    }
  }
}

template <class I>
void attend(const Attention* p, int64_t task_begin, int64_t task_end, void* scratch) {
  for (int64_t task = task_begin; task < task_end; ++task) {
    const int64_t head = task / p->chunks;
    attend_chunk<I>(p, head / p->kv_heads, head % p->kv_heads, task % p->chunks, static_cast<float*>(scratch));
  }
}

// Joins the chunks of the heads [begin, end) of all sequences, in order, in the place of the first of them.
template <class I>
void join_chunks(const Attention* p, int64_t begin, int64_t end) {
  const int64_t n = p->value.size;
  for (int64_t head = begin; head < end; ++head) {
    float* const parts = p->parts + head * p->chunks * p->part_size();
    float* const total = parts + 2;
    float largest = parts[0];
    for (int64_t c = 1; c < p->chunks; ++c) {
      const float other = parts[c * p->part_size()];
      largest = other > largest ? other : largest;
    }
    float sum = 0;
    for (int64_t c = 0; c < p->chunks; ++c) {
      const float* const part = parts + c * p->part_size();
      const float weight = exponential(part[0] - largest);
      sum += weight * part[1];
      if (c == 0)
        for (int64_t i = 0; i < n; ++i) total[i] *= weight;
      else
        for (int64_t i = 0; i < n; ++i) total[i] += weight * part[2 + i];
    }
    for (int64_t i = 0; i < n; ++i) total[i] /= sum;
    from_floats<I>(total, p->dtype, n, element(p->y, p->dtype, head * n));
  }
}

}  // namespace
