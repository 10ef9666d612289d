#include "experts_job.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "scratch.h"

namespace tilewright {
namespace {

constexpr int64_t kTileRows = 128;  // of one expert at a time: their activations stay in the second-level cache
constexpr int64_t kMostBlocks = 8;  // of one task
constexpr int64_t kTotalBytes = int64_t(1) << 20;  // sums of the tokens in one task, half a second-level cache
constexpr int64_t kTasksOfThread = 4;              // or more, of gate and up
constexpr int64_t kRoundsOfFew = 2;                // tasks of down for each thread where weights are read once
constexpr int64_t kWorkerProducts = 1 << 16;       // that are worth the start of a thread

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

template <class Condition>
void wait_until(Condition condition) {
  for (int spin = 0; !condition(); ++spin)
    if (spin > 1000) std::this_thread::yield();
}

// Takes aligned pieces of a block of memory; with a null base it only counts.
class Pieces {
 public:
  explicit Pieces(uint8_t* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    uint8_t* at = base_ ? base_ + used_ : nullptr;
    used_ += size_t(round_up(count * int64_t(sizeof(T)), 64));
    return reinterpret_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

// `rows` of activations. Their sums have no place, not even past the end, where a plan needs none.
void take_rows(Pieces& pieces, Gemm& g, int64_t rows) {
  g.memory.activations = pieces.take<uint32_t>(rows * g.plan.units);
  g.memory.row_scale = g.plan.scales_per_row ? pieces.take<float>(rows * g.plan.scales_per_row) : nullptr;
  g.memory.row_sums = g.plan.sums_per_row ? pieces.take<int32_t>(rows * g.plan.sums_per_row) : nullptr;
}

// Scratch of one thread for the sums of `blocks` blocks instead of those that the plan asked for.
size_t task_bytes(const GemmPlan& plan, int64_t rows, int64_t blocks) {
  const int64_t planned = plan.task_blocks * plan.task_rows, wanted = blocks * rows;
  return plan.task_bytes + size_t(std::max<int64_t>(wanted - planned, 0) * kBlockN) * 4;
}

}  // namespace

ExpertsJob::ExpertsJob(const Isa& isa, const Blocking& blocking, const Experts& problem, int64_t experts,
                       const Routing& routing, int32_t threads)
    : isa_(isa), e_(problem) {
  route(routing, experts);
  plan(blocking, threads);
  place(static_cast<uint8_t*>(scratch(Scratch::shared, place(nullptr))));
}

// Counting sort by expert; rows of one expert stay in the order of tokens.
void ExpertsJob::route(const Routing& routing, int64_t experts) {
  const int64_t choices = routing.tokens * routing.top_k;
  std::vector<int64_t> first(size_t(experts) + 1);
  for (int64_t i = 0; i < choices; ++i)
    if (routing.experts[i] >= 0) ++first[size_t(routing.experts[i]) + 1];
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t count = first[size_t(e) + 1];
    first[size_t(e) + 1] += first[size_t(e)];
    if (count) routed_.push_back({e, first[size_t(e)], count});
  }
  token_.resize(size_t(first.back()));
  weight_.resize(size_t(first.back()));
  for (int64_t i = 0; i < choices; ++i)
    if (routing.experts[i] >= 0) {
      const size_t row = size_t(first[size_t(routing.experts[i])]++);
      token_[row] = int32_t(i / routing.top_k);
      weight_[row] = routing.weights[i];
    }
  e_.token = token_.data();
  e_.weight = weight_.data();
}

void ExpertsJob::plan(const Blocking& blocking, int32_t threads) {
  const int64_t rows = int64_t(token_.size()), routed = int64_t(routed_.size());
  int64_t most_rows = 1;  // of one expert at a time
  for (const Routed& r : routed_) most_rows = std::max(most_rows, std::min(r.count, kTileRows));
  for (Gemm* g : {&e_.gate_up.first, &e_.down.first}) {
    g->problem.m = most_rows;
    g->plan = isa_.plan(&g->problem, threads, &blocking);
  }
  const GemmProblem &gate = e_.gate_up.first.problem, &down = e_.down.first.problem, x = e_.tokens.problem;
  const GemmPlan &gate_plan = e_.gate_up.first.plan, &down_plan = e_.down.first.plan;
  e_.tokens = e_.gate_up.first;
  GemmProblem& tokens = e_.tokens.problem;
  tokens.x = x.x, tokens.x_stride = x.x_stride, tokens.dtype = x.dtype, tokens.m = x.m;

  e_.tile_rows = round_up(kTileRows, gate_plan.rows);
  for (int64_t i = 0; i < routed; ++i)
    for (int64_t begin = 0; begin < routed_[size_t(i)].count; begin += e_.tile_rows)
      tiles_.push_back({i, begin, std::min(begin + e_.tile_rows, routed_[size_t(i)].count)});
  const int64_t tiles = int64_t(tiles_.size());

  // Tasks are runs of blocks, a few for each thread: long, so that memory is read in order, but so many that the
  // threads end together.
  const int64_t gate_blocks = ceil_div(gate.n, kBlockN), down_blocks = ceil_div(down.n, kBlockN);
  gate_blocks_ = std::clamp<int64_t>(tiles * gate_blocks / (kTasksOfThread * threads), 1, kMostBlocks / 2);
  const int64_t total_row = tokens.m * kBlockN * 4;
  const int64_t most = std::clamp<int64_t>(kTotalBytes / std::max<int64_t>(total_row, 1), 1, kMostBlocks);
  const int64_t rounds = std::max(ceil_div(down_blocks, threads * most), most_rows > gate_plan.rows ? 1 : kRoundsOfFew);
  down_blocks_ = ceil_div(down_blocks, threads * rounds);
  gate_groups_ = ceil_div(gate_blocks, gate_blocks_);
  down_groups_ = ceil_div(down_blocks, down_blocks_);
  convert_rows_ = 1 + (int64_t(1) << 15) / gate.k;
  convert_tasks_ = rows ? ceil_div(tokens.m, convert_rows_) : 0;

  int64_t tile_rows = 0;
  for (const Tile& tile : tiles_) tile_rows = std::max(tile_rows, tile.end - tile.begin);
  isa_bytes_ =
      std::max({gate_plan.prepare_bytes, down_plan.prepare_bytes, task_bytes(gate_plan, tile_rows, 2 * gate_blocks_),
                task_bytes(down_plan, tile_rows, down_blocks_)});
  isa_bytes_ = size_t(round_up(int64_t(isa_bytes_), 64));
  total_bytes_ = size_t(total_row * down_blocks_);
  const int64_t products = 3 * rows * gate.n * gate.k;
  workers_ = std::clamp<int64_t>(products / kWorkerProducts, 1, threads);

  unconverted_ = convert_tasks_;
  gathered_ = std::vector<std::atomic<int32_t>>(size_t(tiles));
  gates_left_ = std::vector<std::atomic<int32_t>>(size_t(tiles));
  tiles_left_ = std::vector<std::atomic<int32_t>>(size_t(routed));
  for (int64_t i = 0; i < tiles; ++i) {
    gates_left_[size_t(i)] = int32_t(gate_groups_);
    ++tiles_left_[size_t(tiles_[size_t(i)].routed)];
  }
}

// Lays out the memory that the threads share; returns its size.
size_t ExpertsJob::place(uint8_t* base) {
  Pieces pieces(base);
  const int64_t rows = int64_t(token_.size());
  GemmProblem& down = e_.down.first.problem;
  take_rows(pieces, e_.tokens, e_.tokens.problem.m);
  take_rows(pieces, e_.gate_up.first, rows);
  take_rows(pieces, e_.down.first, rows);
  e_.inner = pieces.take<uint16_t>(rows * down.k);
  down.x = e_.inner;
  down.x_stride = down.k;
  down.dtype = Float::bf16;
  return pieces.used();
}

void ExpertsJob::work() {
  // All of it now: a thread that failed in the middle would leave the others waiting.
  auto* own = static_cast<uint8_t*>(scratch(Scratch::own, isa_bytes_ + total_bytes_));
  const int64_t tasks = convert_tasks_ + int64_t(tiles_.size()) * (1 + gate_groups_) + down_groups_;
  for (int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks;) run(task, own);
}

void ExpertsJob::run(int64_t task, uint8_t* scratch) {
  const int64_t tiles = int64_t(tiles_.size());
  if (task < convert_tasks_) {
    const int64_t begin = task * convert_rows_;
    isa_.convert_rows(&e_, begin, std::min(begin + convert_rows_, e_.tokens.problem.m), scratch);
    unconverted_.fetch_sub(1, std::memory_order_release);
  } else if ((task -= convert_tasks_) < tiles) {
    gather(task);
  } else if ((task -= tiles) < tiles * gate_groups_) {
    gate_up(task / gate_groups_, task % gate_groups_, scratch);
  } else {
    down(task - tiles * gate_groups_, scratch);
  }
}

void ExpertsJob::gather(int64_t index) {
  const Tile& tile = tiles_[size_t(index)];
  wait_until([&] { return unconverted_.load(std::memory_order_acquire) == 0; });
  isa_.gather_rows(&e_, &routed_[size_t(tile.routed)], tile.begin, tile.end);
  gathered_[size_t(index)].store(1, std::memory_order_release);
}

void ExpertsJob::gate_up(int64_t index, int64_t group, uint8_t* scratch) {
  const Tile& tile = tiles_[size_t(index)];
  const Routed& routed = routed_[size_t(tile.routed)];
  const int64_t blocks = ceil_div(e_.gate_up.first.problem.n, kBlockN), begin = group * gate_blocks_;
  const Range at{tile.begin, tile.end, begin, std::min(begin + gate_blocks_, blocks)};
  wait_until([&] { return gathered_[size_t(index)].load(std::memory_order_acquire) != 0; });
  isa_.gate_up(&e_, &routed, &at, scratch);
  if (gates_left_[size_t(index)].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  // The last task of a tile has all its inner rows in reach: quantizes and lays them out.
  const Gemm p = matrix_of(&e_.down, routed.expert, &routed);
  isa_.prepare(&p, tile.begin, tile.end, scratch);
  tiles_left_[size_t(tile.routed)].fetch_sub(1, std::memory_order_release);
}

// Some columns of all tokens, expert after expert: nothing but the result leaves the thread.
void ExpertsJob::down(int64_t group, uint8_t* scratch) {
  auto* total = reinterpret_cast<float*>(scratch + isa_bytes_);
  const int64_t blocks = ceil_div(e_.down.first.problem.n, kBlockN), begin = group * down_blocks_;
  const int64_t end = std::min(begin + down_blocks_, blocks);
  std::memset(total, 0, size_t(e_.tokens.problem.m * (end - begin) * kBlockN) * 4);
  for (size_t i = 0; i < routed_.size(); ++i) {
    wait_until([&] { return tiles_left_[i].load(std::memory_order_acquire) == 0; });
    isa_.down(&e_, &routed_[i], begin, end, total, scratch);
  }
  isa_.store_rows(&e_, begin, end, total);
}

}  // namespace tilewright
