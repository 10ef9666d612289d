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

// What the fields may be: the drivers count on whole packed columns, steps of tiles and cache lines.
struct Field {
  const char* name;
  int64_t Blocking::* field;
  int64_t unit, least;
};
constexpr int64_t kMostField = int64_t(1) << 30;
constexpr Field kFields[] = {
    {"bf16_chunk", &Blocking::bf16_chunk, 128, 128},
    {"int8_chunk", &Blocking::int8_chunk, 128, 128},
    {"streaming_bytes", &Blocking::streaming_bytes, 1, 0},
    {"task_rows", &Blocking::task_rows, 1, 1},
    {"task_blocks", &Blocking::task_blocks, 1, 1},
    {"weights_ahead", &Blocking::weights_ahead, 64, 0},
    {"turn", &Blocking::turn, 64, 0},
    {"joint_blocks", &Blocking::joint_blocks, 1, 1},
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
  for (size_t i = 0; i < fields.size(); ++i)
    if (fields[i] >= 0) b.*kFields[i].field = fields[i];
  return b;
}

std::string select_blocking(std::vector<int64_t> fields) {
  if (fields.size() > std::size(kFields)) return "there are " + std::to_string(std::size(kFields)) + " fields";
  for (size_t i = 0; i < fields.size(); ++i) {
    const auto& [name, field, unit, least] = kFields[i];
    if (fields[i] >= 0 && (fields[i] < least || fields[i] > kMostField || fields[i] % unit))
      return std::string(name) + " is " + std::to_string(fields[i]) + ", it must be a multiple of " +
             std::to_string(unit) + " from " + std::to_string(least) + " to " + std::to_string(kMostField);
  }
  overrides() = std::move(fields);
  return "";
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
