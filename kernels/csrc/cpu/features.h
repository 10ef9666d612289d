// What this processor and its operating system can run.
#pragma once
#include <string>

namespace tilewright {

// Why features of instruction_sets.def, separated by spaces, cannot be used here: the reason for the first that is
// missing, or "" where there is none. The machine is asked once per process: CPUID for the instructions, XCR0 for the
// registers that the system saves, and for AMX the permission that Linux grants on request.
std::string why_missing(const std::string& features);

}  // namespace tilewright
