// The operators of packed Linears: checks, memory and threads around one call of the chosen instruction set. Only the
// bindings include torch, on its stable ABI, so that one binary serves every torch from 2.10 on.
#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "check.h"
#include "cpu/dispatch.h"
#include "cpu/scratch.h"

namespace tilewright {
namespace {

const uint8_t* contiguous_bytes(const Tensor& t, const char* name, ScalarType type, const char* type_name) {
  return static_cast<const uint8_t*>(contiguous_data(t, name, type, type_name));
}

const float* contiguous_floats(const Tensor& t, const char* name) {
  return static_cast<const float*>(contiguous_data(t, name, ScalarType::Float, "float32"));
}

const float* checked_bias(const std::optional<Tensor>& bias, int64_t n) {
  if (!bias) return nullptr;
  TILEWRIGHT_CHECK(bias->numel() == n, "bias has ", bias->numel(), " elements, n is ", n);
  return contiguous_floats(*bias, "bias");
}

// x as rows: sizes, pointer and stride; `rows` keeps a copy alive where one was needed.
GemmProblem problem(Kind kind, const Tensor& x, int64_t n, Tensor& rows) {
  TILEWRIGHT_CHECK(x.dim() >= 1 && x.size(-1) > 0, "x must have at least one dimension and one column, its shape is ",
                   shape(x));
  GemmProblem p{};
  p.kind = kind;
  p.dtype = float_type(x);
  p.n = checked_size(n, "n");
  p.k = checked_size(x.size(-1), "the last size of x");
  p.m = x.numel() / p.k;
  p.padded_k = round_up(p.k, 32);
  TILEWRIGHT_CHECK(p.m <= (int64_t(1) << 56) / (p.k + p.n + 128), "x has ", p.m, " rows, which is too many");
  std::tie(rows, p.x_stride) = rows_of(x);
  p.x = rows.const_data_ptr();
  return p;
}

void check_rows(GemmProblem& p, const Tensor& weight, int64_t columns) {
  TILEWRIGHT_CHECK(weight.dim() == 2 && weight.size(1) == columns, "weight is ", shape(weight), ", x with ", p.k,
                   " columns needs [rows, ", columns, "]");
  p.stored_n = weight.size(0);
  const int64_t unit = p.kind == Kind::int8 ? 32 : 16;
  TILEWRIGHT_CHECK(p.stored_n >= p.n && p.stored_n < p.n + 32 && p.stored_n % unit == 0, "weight has ", p.stored_n,
                   " packed rows, n = ", p.n, " needs ", round_up(p.n, 32));
}

// Every worker has a run of consecutive tasks, whose rows its cache keeps, and then helps the others with theirs.
void compute_together(const Isa& isa, const Gemm& g, int64_t threads, int64_t tasks) {
  struct alignas(64) Run {
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int64_t workers = std::min(threads, tasks);
  std::vector<Run> runs(static_cast<size_t>(workers));
  for (int64_t w = 0; w < workers; ++w) {
    runs[size_t(w)].next = tasks * w / workers;
    runs[size_t(w)].end = tasks * (w + 1) / workers;
  }
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    void* const own = scratch(Scratch::own, g.plan.task_bytes);
    for (int64_t i = begin; i < end + workers - 1; ++i) {
      Run& run = runs[size_t(i % workers)];
      for (int64_t task; (task = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end;)
        isa.compute(&g, task, task + 1, own);
    }
  });
}

Tensor run(GemmProblem& p, const Tensor& x, const Tensor* out, Inputs inputs) {
  Tensor y = result(x, p.n, out, inputs);
  if (p.m == 0 || p.n == 0) return y;
  p.y = y.mutable_data_ptr();
  const auto threads = int32_t(torch::stable::get_num_threads());
  const Isa& isa = tilewright::isa();
  const Blocking cut = blocking(isa);
  const GemmPlan plan = isa.plan(&p, threads, &cut);
  const size_t bytes = workspace_bytes(plan, p.m);
  const Gemm g{p, plan, workspace(plan, p.m, static_cast<uint8_t*>(scratch(Scratch::shared, bytes)))};

  // A thread is worth its start for about 2^15 activations, or as many products of 2^16.
  const int64_t tasks = plan.row_tasks * plan.block_tasks, row_grain = 1 + (int64_t(1) << 15) / p.k;
  const int64_t task_grain =
      1 + (int64_t(1) << 16) / (std::min(p.m, plan.task_rows) * plan.task_blocks * kBlockN * p.k);
  torch::stable::parallel_for(0, p.m, row_grain, [&](int64_t begin, int64_t end) {
    isa.prepare(&g, begin, end, scratch(Scratch::own, plan.prepare_bytes));
  });
  if (plan.streams) {
    torch::stable::parallel_for(0, tasks, task_grain, [&](int64_t begin, int64_t end) {
      isa.compute(&g, begin, end, scratch(Scratch::own, plan.task_bytes));
    });
  } else {
    compute_together(isa, g, threads, tasks);
  }
  return y;
}

Tensor linear_bf16(const Tensor* out, const Tensor& x, const Tensor& weight, int64_t n, std::optional<Tensor> bias) {
  Tensor rows;
  GemmProblem p = problem(Kind::bf16, x, n, rows);
  p.weight = contiguous_bytes(weight, "weight", ScalarType::BFloat16, "bfloat16");
  check_rows(p, weight, p.padded_k);
  p.bias = checked_bias(bias, n);
  return run(p, x, out, {&weight, pointer(bias)});
}

Tensor linear_int8(const Tensor* out, const Tensor& x, const Tensor& weight, const Tensor& scale, int64_t n,
                   std::optional<Tensor> bias, int64_t activation_group, int64_t rotation) {
  Tensor rows;
  GemmProblem p = problem(Kind::int8, x, n, rows);
  set_activations(p, activation_group, rotation);
  p.weight = contiguous_bytes(weight, "weight", ScalarType::Char, "int8");
  check_rows(p, weight, p.padded_k + 4);
  p.scale = contiguous_floats(scale, "scale");
  TILEWRIGHT_CHECK(scale.numel() == p.stored_n || scale.numel() == n, "scale has ", scale.numel(),
                   " elements, weight has ", p.stored_n, " packed rows");
  p.bias = checked_bias(bias, n);
  return run(p, x, out, {&weight, &scale, pointer(bias)});
}

Tensor linear_fp8(const Tensor* out, const Tensor& x, const Tensor& weight, const Tensor& scale, int64_t n,
                  std::optional<Tensor> bias) {
  Tensor rows;
  GemmProblem p = problem(Kind::fp8, x, n, rows);
  p.weight = contiguous_bytes(weight, "weight", ScalarType::Float8_e4m3fn, "float8_e4m3fn");
  check_rows(p, weight, p.padded_k);
  p.scale = contiguous_floats(scale, "scale");
  const int64_t scale_rows = ceil_div(n, 128), scale_columns = ceil_div(p.k, 128);
  TILEWRIGHT_CHECK(scale.dim() == 2 && scale.size(0) == scale_rows && scale.size(1) == scale_columns, "scale is ",
                   shape(scale), ", a weight of ", n, " x ", p.k, " needs [", scale_rows, ", ", scale_columns, "]");
  p.bias = checked_bias(bias, n);
  return run(p, x, out, {&weight, &scale, pointer(bias)});
}

Tensor linear_int4(const Tensor* out, const Tensor& x, const Tensor& weight, const Tensor& zeros, const Tensor& scale,
                   int64_t n, std::optional<Tensor> bias, bool int8_activations, int64_t activation_group,
                   int64_t rotation) {
  Tensor rows;
  GemmProblem p = problem(int8_activations ? Kind::int4_int8 : Kind::int4_bf16, x, n, rows);
  p.weight = contiguous_bytes(weight, "weight", ScalarType::Byte, "uint8");
  p.zeros = static_cast<const int8_t*>(contiguous_data(zeros, "zeros", ScalarType::Char, "int8"));
  p.scale = contiguous_floats(scale, "scale");
  TILEWRIGHT_CHECK(weight.dim() == 3, "weight must have three dimensions, it is ", shape(weight));
  const int64_t blocks = ceil_div(n, 32), groups = weight.size(1);
  p.group = (weight.size(2) - 128) / 16;
  TILEWRIGHT_CHECK((p.group == 32 || p.group == 64 || p.group == 128) && weight.size(2) == p.group * 16 + 128,
                   "weight is ", shape(weight), ", its last size must be 16 * group + 128, the group 32, 64 or 128");
  TILEWRIGHT_CHECK(weight.size(0) == blocks && groups == ceil_div(p.k, p.group), "weight is ", shape(weight), ", ", n,
                   " x ", p.k, " in groups of ", p.group, " needs [", blocks, ", ", ceil_div(p.k, p.group), ", ",
                   p.group * 16 + 128, "]");
  for (const Tensor* t : {&zeros, &scale})
    TILEWRIGHT_CHECK(t->dim() == 3 && t->size(0) == blocks && t->size(1) == groups && t->size(2) == 32,
                     "zeros and scale must be [", blocks, ", ", groups, ", 32], one is ", shape(*t));
  set_activations(p, activation_group, rotation);
  p.stored_n = blocks * 32;
  p.padded_k = groups * p.group;
  p.bias = checked_bias(bias, n);
  return run(p, x, out, {&weight, &zeros, &scale, pointer(bias)});
}

Tensor linear_int4_compact(const Tensor* out, const Tensor& x, const Tensor& weight, int64_t n,
                           std::optional<Tensor> bias, bool int8_activations, int64_t activation_group,
                           int64_t rotation) {
  Tensor rows;
  GemmProblem p = problem(int8_activations ? Kind::int4_int8 : Kind::int4_bf16, x, n, rows);
  p.weight = contiguous_bytes(weight, "weight", ScalarType::Byte, "uint8") + kCompactScales;
  p.compact = true;
  TILEWRIGHT_CHECK(weight.dim() == 3, "weight must have three dimensions, it is ", shape(weight));
  const int64_t blocks = ceil_div(n, kBlockN), groups = weight.size(1);
  p.group = compact_group(weight.size(2));
  TILEWRIGHT_CHECK(p.group && weight.size(0) == blocks && groups == ceil_div(p.k, p.group), "weight is ", shape(weight),
                   ", ", n, " x ", p.k, " in groups of 32, 64 or 128 needs [", blocks, ", groups, 16 * group + 64]");
  set_activations(p, activation_group, rotation);
  p.stored_n = blocks * kBlockN;
  p.padded_k = groups * p.group;
  p.bias = checked_bias(bias, n);
  return run(p, x, out, {&weight, pointer(bias)});
}

Tensor linear_mxfp4(const Tensor* out, const Tensor& x, const Tensor& weight, int64_t n, std::optional<Tensor> bias) {
  Tensor rows;
  GemmProblem p = problem(Kind::mxfp4, x, n, rows);
  p.weight = contiguous_bytes(weight, "weight", ScalarType::Byte, "uint8");
  const int64_t blocks = ceil_div(n, kBlockN), columns = ceil_div(p.k, kMxfp4Columns);
  TILEWRIGHT_CHECK(
      weight.dim() == 3 && weight.size(0) == blocks && weight.size(1) == columns && weight.size(2) == kMxfp4Bytes,
      "weight is ", shape(weight), ", ", n, " x ", p.k, " in mxfp4 needs [", blocks, ", ", columns, ", ", kMxfp4Bytes,
      "]");
  p.stored_n = blocks * kBlockN;
  p.padded_k = columns * kMxfp4Columns;
  p.bias = checked_bias(bias, n);
  return run(p, x, out, {&weight, pointer(bias)});
}

std::string isa_name() { return isa().name; }

// Each thread frees its own: the calling one and those that it starts for its work.
void release_scratch() {
  torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1,
                              [](int64_t, int64_t) { tilewright::release_scratch_of_thread(); });
  tilewright::release_scratch_of_thread();
}

void checked_blocking(std::vector<int64_t> fields) {
  const std::string problem = tilewright::select_blocking(std::move(fields));
  TILEWRIGHT_CHECK(problem.empty(), problem);
}

}  // namespace
}  // namespace tilewright

STABLE_TORCH_LIBRARY(tilewright, m) {
  m.def("linear_bf16(Tensor x, Tensor weight, int n, Tensor? bias=None) -> Tensor");
  m.def(
      "linear_int8(Tensor x, Tensor weight, Tensor scale, int n, Tensor? bias=None, int activation_group=0, int "
      "rotation=0) -> Tensor");
  m.def("linear_fp8(Tensor x, Tensor weight, Tensor scale, int n, Tensor? bias=None) -> Tensor");
  m.def(
      "linear_int4(Tensor x, Tensor weight, Tensor zeros, Tensor scale, int n, Tensor? bias=None, "
      "bool int8_activations=True, int activation_group=0, int rotation=0) -> Tensor");
  m.def(
      "linear_int4_compact(Tensor x, Tensor weight, int n, Tensor? bias=None, bool int8_activations=True, "
      "int activation_group=0, int rotation=0) -> Tensor");
  m.def(
      "linear_int4_compact.out(Tensor x, Tensor weight, int n, Tensor? bias=None, bool int8_activations=True, "
      "int activation_group=0, int rotation=0, *, Tensor(a!) out) -> ()");
  m.def("linear_mxfp4(Tensor x, Tensor weight, int n, Tensor? bias=None) -> Tensor");
  m.def("linear_mxfp4.out(Tensor x, Tensor weight, int n, Tensor? bias=None, *, Tensor(a!) out) -> ()");
  m.def("linear_bf16.out(Tensor x, Tensor weight, int n, Tensor? bias=None, *, Tensor(a!) out) -> ()");
  m.def(
      "linear_int8.out(Tensor x, Tensor weight, Tensor scale, int n, Tensor? bias=None, int activation_group=0, int "
      "rotation=0, *, Tensor(a!) out) -> ()");
  m.def("linear_fp8.out(Tensor x, Tensor weight, Tensor scale, int n, Tensor? bias=None, *, Tensor(a!) out) -> ()");
  m.def(
      "linear_int4.out(Tensor x, Tensor weight, Tensor zeros, Tensor scale, int n, Tensor? bias=None, "
      "bool int8_activations=True, int activation_group=0, int rotation=0, *, Tensor(a!) out) -> ()");
  m.def("isa() -> str");
  m.def("isa_report() -> str");
  m.def("select_isa(str name) -> str");
  m.def("select_blocking(int[] fields) -> ()");
  m.def("release_scratch() -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("linear_bf16", TORCH_BOX(&tilewright::Op<tilewright::linear_bf16>::fresh));
  m.impl("linear_bf16.out", TORCH_BOX(&tilewright::Op<tilewright::linear_bf16>::into));
  m.impl("linear_int8", TORCH_BOX(&tilewright::Op<tilewright::linear_int8>::fresh));
  m.impl("linear_int8.out", TORCH_BOX(&tilewright::Op<tilewright::linear_int8>::into));
  m.impl("linear_fp8", TORCH_BOX(&tilewright::Op<tilewright::linear_fp8>::fresh));
  m.impl("linear_fp8.out", TORCH_BOX(&tilewright::Op<tilewright::linear_fp8>::into));
  m.impl("linear_int4", TORCH_BOX(&tilewright::Op<tilewright::linear_int4>::fresh));
  m.impl("linear_int4.out", TORCH_BOX(&tilewright::Op<tilewright::linear_int4>::into));
  m.impl("linear_int4_compact", TORCH_BOX(&tilewright::Op<tilewright::linear_int4_compact>::fresh));
  m.impl("linear_int4_compact.out", TORCH_BOX(&tilewright::Op<tilewright::linear_int4_compact>::into));
  m.impl("linear_mxfp4", TORCH_BOX(&tilewright::Op<tilewright::linear_mxfp4>::fresh));
  m.impl("linear_mxfp4.out", TORCH_BOX(&tilewright::Op<tilewright::linear_mxfp4>::into));
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&tilewright::isa_name));
  m.impl("isa_report", TORCH_BOX(&tilewright::report));
  m.impl("select_isa", TORCH_BOX(&tilewright::select));
  m.impl("release_scratch", TORCH_BOX(&tilewright::release_scratch));
  m.impl("select_blocking", TORCH_BOX(&tilewright::checked_blocking));
}
