// Runs an expert layer on several threads: routing, memory, and one queue of tasks.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "experts.h"

namespace tilewright {

// Where each token goes.
struct Routing {
  const int32_t* experts;  // [tokens][top_k], -1 for none
  const float* weights;    // [tokens][top_k]
  int64_t tokens, top_k;
};

// One call of an operator: make it, then call `work` once on each of `workers` threads.
//
// All tasks are in one queue, in an order in which what a task waits for comes before it. Whoever takes a task
// therefore waits only for tasks that are done or that another thread is at, so any number of threads gets to the end,
// even one.
class ExpertsJob {
 public:
  // The matrices of `problem` are described but not planned. Uses this thread's shared scratch memory.
  ExpertsJob(const Isa& isa, const Blocking& blocking, const Experts& problem, int64_t experts, const Routing& routing,
             int32_t threads);

  int64_t workers() const { return workers_; }
  void work();

 private:
  struct Tile {
    int64_t routed, begin, end;  // rows of routed_[routed]
  };

  void route(const Routing& routing, int64_t experts);
  void plan(const Blocking& blocking, int32_t threads);
  size_t place(uint8_t* base);
  void run(int64_t task, uint8_t* scratch);
  void gather(int64_t tile);
  void gate_up(int64_t tile, int64_t group, uint8_t* scratch);
  void down(int64_t group, uint8_t* scratch);

  const Isa& isa_;
  Experts e_;
  std::vector<int32_t> token_;
  std::vector<float> weight_;
  std::vector<Routed> routed_;
  std::vector<Tile> tiles_;

  int64_t convert_rows_ = 0, convert_tasks_ = 0;  // tokens of a task
  int64_t gate_blocks_ = 0, gate_groups_ = 0;     // blocks of a task, tasks of a tile
  int64_t down_blocks_ = 0, down_groups_ = 0;
  int64_t workers_ = 0;
  size_t isa_bytes_ = 0, total_bytes_ = 0;  // scratch of one thread: the instruction set's, sums of the tokens

  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> unconverted_{0};           // tasks
  std::vector<std::atomic<int32_t>> gathered_;    // by tile
  std::vector<std::atomic<int32_t>> gates_left_;  // by tile: tasks
  std::vector<std::atomic<int32_t>> tiles_left_;  // by routed_
};

}  // namespace tilewright
