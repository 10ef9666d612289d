// Memory that one thread reuses from call to call.
#pragma once
#include <cstddef>

namespace tilewright {

enum class Scratch { shared, own };  // what a call shares with its helper threads; what each thread has for itself

// At least `bytes` of this thread's memory of that use, aligned to 64 bytes, contents undefined. Valid until the same
// thread asks for the same use again. Throws std::bad_alloc.
void* scratch(Scratch use, size_t bytes);

// Frees what this thread holds. The memory otherwise stays as large as the largest call has been (docs/runtime.md).
void release_scratch_of_thread();

}  // namespace tilewright
