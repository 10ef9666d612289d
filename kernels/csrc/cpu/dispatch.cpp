#include "dispatch.h"

#include <atomic>
#include <iterator>
#include <utility>

#include "features.h"

#define TILEWRIGHT_ON_any(...) __VA_ARGS__
#if defined(__x86_64__)
#define TILEWRIGHT_ON_x86_64(...) __VA_ARGS__
#else
#define TILEWRIGHT_ON_x86_64(...)
#endif

// What the files of isa/ and convert/ define. Declared for every line, defined for those of this processor.
#define TILEWRIGHT_INSTRUCTION_SET(name, processor, conversion, tests_only, features, flags)    \
  extern "C" __attribute__((visibility("hidden"))) const tilewright::Isa tilewright_isa_##name; \
  extern "C" __attribute__((visibility("hidden"))) const tilewright::Convert tilewright_convert_##conversion;
#include "instruction_sets.def"
#undef TILEWRIGHT_INSTRUCTION_SET

namespace tilewright {
namespace {

struct InstructionSet {
  const char* name;
  const Isa* isa;
  const Convert* convert;
  bool tests_only;
  std::string missing;  // why it cannot be used here; empty if it can
};

// Best first.
const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> all = {
#define TILEWRIGHT_INSTRUCTION_SET(name, processor, conversion, tests_only, features, flags) \
  TILEWRIGHT_ON_##processor(                                                                 \
      {#name, &tilewright_isa_##name, &tilewright_convert_##conversion, tests_only, why_missing(features)}, )
#include "instruction_sets.def"
#undef TILEWRIGHT_INSTRUCTION_SET
  };
  return all;
}

const InstructionSet& best() {
  for (const InstructionSet& set : instruction_sets())
    if (!set.tests_only && set.missing.empty()) return set;
  return instruction_sets().back();  // unreachable: the portable one runs everywhere
}

std::atomic<const InstructionSet*>& chosen() {
  static std::atomic<const InstructionSet*> current{&best()};
  return current;
}

std::vector<int64_t>& overrides() {
  static std::vector<int64_t> fields;
  return fields;
}

// What the fields may be: the drivers count on whole packed columns, steps of tiles and cache lines.
struct Field {
  const char* name;
  int64_t Blocking::* field;
  int64_t unit, least;
};
constexpr int64_t kMostField = int64_t(1) << 30;
constexpr Field kFields[] = {
    {"bf16_chunk", &Blocking::bf16_chunk, 128, 128},       {"int8_chunk", &Blocking::int8_chunk, 128, 128},
    {"streaming_bytes", &Blocking::streaming_bytes, 1, 0}, {"task_rows", &Blocking::task_rows, 1, 1},
    {"task_blocks", &Blocking::task_blocks, 1, 1},         {"weights_ahead", &Blocking::weights_ahead, 64, 0},
    {"l1_k_bytes", &Blocking::l1_k_bytes, 64, 0},          {"n_blocks_per_pass", &Blocking::n_blocks_per_pass, 1, 1},
};

}  // namespace

const Isa& isa() { return *chosen().load(std::memory_order_relaxed)->isa; }

const Convert& convert() { return *chosen().load(std::memory_order_relaxed)->convert; }

std::string select(const std::string& name) {
  if (name.empty()) {
    chosen() = &best();
    return "";
  }
  std::string known;
  for (const InstructionSet& set : instruction_sets()) {
    if (name == set.name) {
      if (!set.missing.empty()) return "`" + name + "` cannot run here: " + set.missing;
      chosen() = &set;
      return "";
    }
    known += (known.empty() ? "" : ", ") + std::string(set.name);
  }
  return "there is no instruction set `" + name + "`; known are " + known;
}

Blocking blocking(const Isa& isa) {
  Blocking b = *isa.blocking;
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
  for (const InstructionSet& set : instruction_sets())
    lines += std::string(set.name) + "\t" + set.missing + "\t" + (set.tests_only ? "for tests only" : "") + "\n";
  return lines;
}

}  // namespace tilewright
