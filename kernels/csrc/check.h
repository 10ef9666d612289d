// TILEWRIGHT_CHECK(condition, parts...): refuse with a message made of strings and integers.
//
// torch's own STD_TORCH_CHECK builds messages with a stream. Where a compiler links libstdc++ statically into this
// library, torch's copy and ours disagree about locales and the stream crashes, so streams are not used here.
#pragma once
#include <concepts>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tilewright {

inline void append(std::string& message, std::string_view part) { message += part; }
inline void append(std::string& message, std::integral auto part) { message += std::to_string(part); }

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Parts&... parts) {
  std::string message = "tilewright: ";
  (append(message, parts), ...);
  throw std::runtime_error(message);
}

}  // namespace tilewright

#define TILEWRIGHT_CHECK(condition, ...) \
  do {                                   \
    if (!(condition)) [[unlikely]]       \
      tilewright::refuse(__VA_ARGS__);   \
  } while (false)
