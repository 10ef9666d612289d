// What the machine can do at most: bytes read from memory, and products on AMX tiles without touching memory. Compiled
// and loaded by bench_linear.py for the machine at hand; the process must hold the permission to use tiles.
#include <immintrin.h>
#include <omp.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

#ifdef __AMX_INT8__
struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// 4 * steps products of 16 x 16 x 64 bytes on every thread, in registers.
template <bool kInt8>
void products(int64_t steps, int threads) {
#pragma omp parallel num_threads(threads)
  {
    TileConfig config;
    for (int i = 0; i < 8; ++i) config.rows[i] = 16, config.row_bytes[i] = 64;
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t i = 0; i < steps; ++i) {
      if constexpr (kInt8) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_release();
  }
}
#endif

}  // namespace

extern "C" {

int threads() { return omp_get_max_threads(); }

// Reads every byte once, all threads; the result keeps the loads alive.
uint64_t read_memory(const uint8_t* data, size_t bytes) {
  uint64_t sum = 0;
#pragma omp parallel reduction(^ : sum)
  {
    const size_t count = bytes / 64 / omp_get_num_threads() * 64;
    const uint8_t* from = data + count * omp_get_thread_num();
    __m256i a[4] = {};
    for (size_t i = 0; i + 128 <= count; i += 128)
      for (int v = 0; v < 4; ++v)
        a[v] = _mm256_xor_si256(a[v], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i) + v));
    a[0] = _mm256_xor_si256(_mm256_xor_si256(a[0], a[1]), _mm256_xor_si256(a[2], a[3]));
    uint64_t words[4];
    memcpy(words, a, sizeof words);
    sum ^= words[0] ^ words[1] ^ words[2] ^ words[3];
  }
  return sum;
}

#ifdef __AMX_INT8__
void products_int8(int64_t steps, int threads) { products<true>(steps, threads); }
void products_bf16(int64_t steps, int threads) { products<false>(steps, threads); }
#endif
}
