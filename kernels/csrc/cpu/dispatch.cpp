#include "dispatch.h"

#include <atomic>
#include <iterator>
#include <utility>

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

std::vector<int64_t>& overrides() {
  static std::vector<int64_t> fields;
  return fields;
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

Blocking blocking() {
  Blocking b = *isa().blocking;
  const std::vector<int64_t>& fields = overrides();
  int64_t* const own[] = {&b.bf16_chunk,    &b.int8_chunk, &b.streaming_bytes, &b.task_rows, &b.task_blocks,
                          &b.weights_ahead, &b.turn,       &b.joint_blocks};
  for (size_t i = 0; i < std::size(own) && i < fields.size(); ++i)
    if (fields[i] >= 0) *own[i] = fields[i];
  return b;
}

void select_blocking(std::vector<int64_t> fields) { overrides() = std::move(fields); }

std::string report() {
  std::string lines;
  for (const Candidate& c : kCandidates) {
    const char* why = reason(c);
    lines += std::string(c.isa->name) + "\t" + (why ? why : "") + "\t" + (c.test_only ? "for tests only" : "") + "\n";
  }
  return lines;
}

}  // namespace tilewright
