// A mapped file that becomes shorter, or whose disk fails, raises SIGBUS in whoever reads it. While the guard is on,
// such a page is replaced by one of zeros and counted: the reader goes on, and its caller refuses what came of it.
// (systemd's journal reads its files in this way.)
#include <signal.h>
#include <sys/mman.h>
#include <torch/csrc/stable/library.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "check.h"

namespace tilewright {
namespace {

std::mutex mutex;
int64_t depth = 0;  // guards that are on, held under the mutex
struct sigaction before;
std::atomic<int64_t> faults{0};
const long page_size = sysconf(_SC_PAGESIZE);

// Nothing but a system call and an atomic: whatever thread is interrupted, in whatever it does.
void on_bus_error(int number, siginfo_t* info, void* context) {
  if (info->si_code == BUS_ADRERR && info->si_addr) {
    void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(info->si_addr) & ~uintptr_t(page_size - 1));
    if (mmap(page, page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page) {
      faults.fetch_add(1);
      return;
    }
  }
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else {
    signal(number, SIG_DFL);  // the instruction runs again and ends the process
  }
}

// Turns one more guard on, or one off; returns the pages that were replaced so far in this process.
int64_t guard_pages(bool on) {
  std::lock_guard<std::mutex> lock(mutex);
  if (on && depth++ == 0) {
    struct sigaction action = {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_RESTART;
    sigemptyset(&action.sa_mask);
    TILEWRIGHT_CHECK(sigaction(SIGBUS, &action, &before) == 0, "the handler of SIGBUS cannot be set");
  }
  if (!on && --depth == 0) sigaction(SIGBUS, &before, nullptr);
  return faults.load();
}

int64_t replaced_pages() { return faults.load(); }

}  // namespace
}  // namespace tilewright

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("guard_pages(bool on) -> int");
  m.def("replaced_pages() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CompositeExplicitAutograd, m) {
  m.impl("guard_pages", TORCH_BOX(&tilewright::guard_pages));
  m.impl("replaced_pages", TORCH_BOX(&tilewright::replaced_pages));
}
