#include "dispatch.h"

#include <atomic>

#include "features.h"

namespace tilewright {
namespace {

struct Candidate {
  const Isa* isa;
  const char* Features::* missing;  // null: runs everywhere
  bool test_only;                   // never chosen unless named
};

// Best first.
const Candidate kCandidates[] = {
#if defined(__x86_64__)
    {&tilewright_isa_amx, &Features::amx, false},         {&tilewright_isa_avx512, &Features::avx512, false},
    {&tilewright_isa_avxvnni, &Features::avxvnni, false}, {&tilewright_isa_avx2, &Features::avx2, false},
#endif
    {&tilewright_isa_portable, nullptr, false},           {&tilewright_isa_amx_emu, nullptr, true},
};

const char* reason(const Candidate& c) { return c.missing ? features().*c.missing : nullptr; }

const Isa* best() {
  for (const Candidate& c : kCandidates)
    if (!c.test_only && !reason(c)) return c.isa;
  return nullptr;  // unreachable: the portable one runs everywhere
}

std::atomic<const Isa*>& chosen() {
  static std::atomic<const Isa*> current{best()};
  return current;
}

}  // namespace

const Isa& isa() { return *chosen().load(std::memory_order_relaxed); }

std::string select(const std::string& name) {
  if (name.empty()) {
    chosen() = best();
    return "";
  }
  std::string known;
  for (const Candidate& c : kCandidates) {
    if (name == c.isa->name) {
      if (const char* why = reason(c)) return "`" + name + "` cannot run here: " + why;
      chosen() = c.isa;
      return "";
    }
    known += (known.empty() ? "" : ", ") + std::string(c.isa->name);
  }
  return "there is no instruction set `" + name + "`; known are " + known;
}

std::string report() {
  std::string lines;
  for (const Candidate& c : kCandidates) {
    const char* why = reason(c);
    lines += std::string(c.isa->name) + "\t" + (why ? why : "") + "\t" + (c.test_only ? "for tests only" : "") + "\n";
  }
  return lines;
}

}  // namespace tilewright
