#include "features.h"

#include <cstdint>
#include <initializer_list>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tilewright {
namespace {

#if defined(__x86_64__)
struct Leaf {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Leaf cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  Leaf r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);  // leaves zeros where the leaf does not exist
  return r;
}

bool all(uint32_t word, std::initializer_list<int> bits) {
  for (int bit : bits)
    if (!(word >> bit & 1)) return false;
  return true;
}

uint64_t saved_registers() {  // XCR0
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

// Linux 5.16 and later keeps the tile registers off until a process asks for them; threads and children inherit it.
bool request_tiles() {
  constexpr int kGetPermission = 0x1022, kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
  uint64_t granted = 0;
  return syscall(SYS_arch_prctl, kGetPermission, &granted) == 0 && (granted >> kTileData & 1);
}

Features detect() {
  const Leaf one = cpuid(1), seven = cpuid(7), seven1 = seven.a >= 1 ? cpuid(7, 1) : Leaf{},
             extended = cpuid(0x80000001);
  const uint64_t saved = all(one.c, {27}) ? saved_registers() : 0;
  Features f{};
  // All of x86-64-v3, which the file is compiled for: FMA, SSSE3 to SSE4.2, MOVBE, POPCNT, AVX, F16C; LZCNT; BMI1,
  // AVX2, BMI2.
  if (!all(one.c, {0, 9, 12, 13, 19, 20, 22, 23, 28, 29}) || !all(extended.c, {5}) || !all(seven.b, {3, 5, 8}))
    f.avx2 = "the CPU lacks AVX2 or another part of x86-64-v3";
  else if ((saved & 0x6) != 0x6)
    f.avx2 = "the operating system does not save AVX registers";
  f.avxvnni = f.avx2 ? f.avx2 : !all(seven1.a, {4}) ? "the CPU lacks AVX-VNNI" : nullptr;
  // AVX512 F, DQ, CD, BW, VL; VBMI, VNNI; BF16.
  if (f.avx2)
    f.avx512 = f.avx2;
  else if (!all(seven.b, {16, 17, 28, 30, 31}) || !all(seven.c, {1, 11}) || !all(seven1.a, {5}))
    f.avx512 = "the CPU lacks AVX-512 F, DQ, CD, BW, VL, VBMI, VNNI or BF16";
  else if ((saved & 0xe6) != 0xe6)
    f.avx512 = "the operating system does not save AVX-512 registers";
  if (f.avx512)
    f.amx = f.avx512;
  else if (!all(seven.d, {22, 24, 25}))
    f.amx = "the CPU lacks AMX TILE, INT8 or BF16";
  else if ((saved & 0x60000) != 0x60000)
    f.amx = "the operating system does not save AMX registers";
  else if (!request_tiles())
    f.amx = "the operating system does not grant the AMX registers";
  return f;
}
#else
Features detect() {
  const char* reason = "the CPU is not x86-64";
  return {reason, reason, reason, reason};
}
#endif

}  // namespace

const Features& features() {
  static const Features found = detect();
  return found;
}

}  // namespace tilewright
