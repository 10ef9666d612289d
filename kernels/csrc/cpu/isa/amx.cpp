// AMX tiles of the processor; everything around the products in AVX-512.
#include "amx-inl.h"
#include "avx512-panels-inl.h"
#include "table-inl.h"

namespace {

// One method per instruction. Inline assembly, since the intrinsics of GCC take no template argument as a tile number.
struct HardwareTiles {
  void config(const TileConfig& c) { asm volatile("ldtilecfg %0" ::"m"(c) : "memory"); }
  void release() { asm volatile("tilerelease"); }
  template <int D>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(D));
  }
  template <int D>
  void load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(D) : "memory");
  }
  template <int D>
  void store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(D) : "memory");
  }
  template <int C, int A, int B>
  void dot_s8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  template <int C, int A, int B>
  void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

using Amx = AmxIsa<HardwareTiles, Avx512Panels<true>>;

}  // namespace

TILEWRIGHT_ISA(amx, Amx)
