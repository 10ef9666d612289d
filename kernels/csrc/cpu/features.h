// What this processor and its operating system can run.
#pragma once
namespace tilewright {

// Why an instruction set cannot be used here, or null if it can.
struct Features {
  const char* avx2;
  const char* avxvnni;
  const char* avx512;
  const char* amx;
};

// Asked once per process: CPUID for the instructions, XCR0 for the registers that the system saves, and for AMX the
// permission that Linux grants on request.
const Features& features();

}  // namespace tilewright
