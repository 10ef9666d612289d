#include "scratch.h"

#include <cstdlib>
#include <new>

namespace tilewright {
namespace {

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { release(); }

  void release() {
    std::free(data);
    data = nullptr;
    size = 0;
  }

  void* reserve(size_t bytes) {
    if (bytes <= size) return data;
    release();
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    data = std::aligned_alloc(64, rounded);
    if (!data) throw std::bad_alloc();
    size = rounded;
    return data;
  }
};

thread_local Buffer buffers[2];

}  // namespace

void* scratch(Scratch use, size_t bytes) { return buffers[static_cast<int>(use)].reserve(bytes); }

void release_scratch_of_thread() {
  for (Buffer& buffer : buffers) buffer.release();
}

}  // namespace tilewright
