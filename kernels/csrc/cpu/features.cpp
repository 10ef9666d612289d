#include "features.h"

#include <algorithm>
#include <cstdint>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tilewright {
namespace {

#if defined(__x86_64__)
// Bits of one register that a leaf of CPUID must set.
struct Bits {
  uint32_t leaf, subleaf;
  char reg;
  std::vector<int> bits;
};

struct Feature {
  const char* name;
  std::vector<Bits> needs;
  const char* lacks;
  uint64_t registers;  // bits of XCR0
  const char* unsaved;
  bool (*request)();  // null: nothing to ask for
  const char* refused;
};

uint32_t cpuid(uint32_t leaf, uint32_t subleaf, char reg) {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (subleaf) {  // leaf 7 says how many it has
    __get_cpuid_count(leaf, 0, &a, &b, &c, &d);
    if (a < subleaf) return 0;
  }
  a = b = c = d = 0;
  __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d);  // leaves zeros where the leaf does not exist
  return reg == 'a' ? a : reg == 'b' ? b : reg == 'c' ? c : d;
}

bool present(const Bits& needs) {
  const uint32_t word = cpuid(needs.leaf, needs.subleaf, needs.reg);
  for (int bit : needs.bits)
    if (!(word >> bit & 1)) return false;
  return true;
}

uint64_t saved_registers() {  // XCR0
  if (!present({1, 0, 'c', {27}})) return 0;
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

const std::vector<Feature>& known() {
  static const std::vector<Feature> features = {
      // All of x86-64-v3: FMA, SSSE3 to SSE4.2, MOVBE, POPCNT, AVX, F16C; LZCNT; BMI1, AVX2, BMI2.
      {"avx2",
       {{1, 0, 'c', {0, 9, 12, 13, 19, 20, 22, 23, 28, 29}}, {0x80000001, 0, 'c', {5}}, {7, 0, 'b', {3, 5, 8}}},
       "the CPU lacks AVX2 or another part of x86-64-v3",
       0x6,
       "the operating system does not save AVX registers",
       nullptr,
       nullptr},
      {"avxvnni", {{7, 1, 'a', {4}}}, "the CPU lacks AVX-VNNI", 0, nullptr, nullptr, nullptr},
      // AVX512 F, DQ, CD, BW, VL; VBMI, VNNI; BF16.
      {"avx512",
       {{7, 0, 'b', {16, 17, 28, 30, 31}}, {7, 0, 'c', {1, 11}}, {7, 1, 'a', {5}}},
       "the CPU lacks AVX-512 F, DQ, CD, BW, VL, VBMI, VNNI or BF16",
       0xe6,
       "the operating system does not save AVX-512 registers",
       nullptr,
       nullptr},
      {"amx",
       {{7, 0, 'd', {22, 24, 25}}},
       "the CPU lacks AMX TILE, INT8 or BF16",
       0x60000,
       "the operating system does not save AMX registers",
       request_tiles,
       "the operating system does not grant the AMX registers"},
  };
  return features;
}

std::string missing(const Feature& feature) {
  for (const Bits& bits : feature.needs)
    if (!present(bits)) return feature.lacks;
  if ((saved_registers() & feature.registers) != feature.registers) return feature.unsaved;
  return feature.request && !feature.request() ? feature.refused : "";
}

std::string why_missing_one(const std::string& name) {
  for (const Feature& feature : known())
    if (name == feature.name) return missing(feature);
  return "cpu/features.cpp knows no feature `" + name + "`";
}
#else
std::string why_missing_one(const std::string&) { return "the CPU is not x86-64"; }
#endif

}  // namespace

std::string why_missing(const std::string& features) {
  for (size_t begin = 0; begin < features.size();) {
    const size_t end = std::min(features.find(' ', begin), features.size());
    if (const std::string why = why_missing_one(features.substr(begin, end - begin)); !why.empty()) return why;
    begin = end + 1;
  }
  return "";
}

}  // namespace tilewright
