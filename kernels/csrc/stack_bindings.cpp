// The operators of stacks of packed matrices: expert layers, batched products.
#include <algorithm>
#include <cmath>
#include <vector>

#include "bindings.h"
#include "cpu/dispatch.h"
#include "cpu/experts_job.h"
#include "cpu/isa/gates-inl.h"
#include "cpu/scratch.h"

namespace tilewright {
namespace {

using Optional = std::optional<Tensor>;

// Tokens run in passes that bound the scratch memory, with enough rows for each expert to be worth reading its weights.
constexpr int64_t kPassTokens = 2048, kPassBytes = int64_t(1) << 27;

const std::string kCompact = "int4-compact";

struct Weights {
  const Tensor& weight;
  const Optional& scale;
  const Optional& zeros;
  const Optional& bias;
  const char* name;
};

// `packing` names the layouts that the type of a weight does not tell.
Kind kind_of(const Tensor& weight, bool int8_activations, const std::string& packing = "") {
  TILEWRIGHT_CHECK(packing.empty() || packing == "mxfp4" || packing == kCompact, "there is no packing `", packing,
                   "`; known are mxfp4, ", kCompact);
  TILEWRIGHT_CHECK(packing.empty() || weight.scalar_type() == ScalarType::Byte, "a weight packed in ", packing,
                   " must be uint8");
  if (packing == "mxfp4") return Kind::mxfp4;
  switch (weight.scalar_type()) {
    case ScalarType::BFloat16:
      return Kind::bf16;
    case ScalarType::Char:
      return Kind::int8;
    case ScalarType::Float8_e4m3fn:
      return Kind::fp8;
    case ScalarType::Byte:
      return int8_activations ? Kind::int4_int8 : Kind::int4_bf16;
    default:
      refuse("a packed weight must be bfloat16, int8, float8_e4m3fn or uint8 (int4)");
  }
}

// `sizes` without the first one is accepted where that is 1: a single matrix that nobody stacked.
void check_sizes(const Tensor& t, const std::string& name, const std::vector<int64_t>& sizes) {
  const int64_t missing = int64_t(sizes.size()) - t.dim();
  bool fits = missing == 0 || (missing == 1 && sizes[0] == 1);
  std::string expected;
  for (size_t i = 0; i < sizes.size(); ++i) expected += (i ? ", " : "") + std::to_string(sizes[i]);
  for (int64_t i = 0; fits && i < t.dim(); ++i) fits = t.size(i) == sizes[size_t(i + missing)];
  TILEWRIGHT_CHECK(fits, name, " is ", shape(t), ", it must be [", expected, "]");
}

const void* checked(const Optional& t, const std::string& name, ScalarType type, const char* type_name,
                    const std::vector<int64_t>& sizes) {
  TILEWRIGHT_CHECK(t, name, " is missing");
  check_sizes(*t, name, sizes);
  return contiguous_data(*t, name.c_str(), type, type_name);
}

void check_absent(const Optional& t, const std::string& name) {
  TILEWRIGHT_CHECK(!t, name, " is given, but weights of this kind have none");
}

// A stack of `experts` weights of `parts` matrices [n, k] each.
Stack stack_of(Kind kind, const Weights& w, int64_t experts, int64_t parts, int64_t n, int64_t k,
               bool compact = false) {
  Stack s{};
  GemmProblem& p = s.first.problem;
  const std::string name = w.name;
  p.kind = kind, p.n = checked_size(n, "the number of columns of the result"), p.k = checked_size(k, "the size of x");
  p.stored_n = round_up(n, kBlockN), p.padded_k = round_up(k, 32);
  TILEWRIGHT_CHECK(w.weight.is_contiguous(), name, " must be contiguous");
  p.weight = static_cast<const uint8_t*>(checked_data(w.weight, w.name));
  if (w.bias) {
    p.bias =
        static_cast<const float*>(checked(w.bias, name + "_bias", ScalarType::Float, "float32", {experts, parts * n}));
    s.bias_stride = n;
  }
  if (compact) {
    check_absent(w.scale, name + "_scale");
    check_absent(w.zeros, name + "_zeros");
    const int64_t bytes = w.weight.dim() ? w.weight.size(-1) : 0;
    p.compact = true;
    p.group = compact_group(bytes);
    TILEWRIGHT_CHECK(p.group, name, " is ", shape(w.weight),
                     ", its last size must be 16 * group + 64, the group 32, 64 or 128");
    const int64_t blocks = ceil_div(n, kBlockN), groups = ceil_div(k, p.group);
    check_sizes(w.weight, name, {experts, parts * blocks, groups, bytes});
    p.weight += kCompactScales;
    p.padded_k = groups * p.group;
    s.weight_stride = blocks * groups * bytes;
    return s;
  }
  if (kind == Kind::int4_int8 || kind == Kind::int4_bf16) {
    p.group = (w.weight.size(-1) - 128) / 16;
    TILEWRIGHT_CHECK((p.group == 32 || p.group == 64 || p.group == 128) && w.weight.size(-1) == p.group * 16 + 128,
                     name, " is ", shape(w.weight),
                     ", its last size must be 16 * group + 128, the group 32, 64 or 128");
    const int64_t blocks = ceil_div(n, kBlockN), groups = ceil_div(k, p.group);
    const std::vector<int64_t> grid = {experts, parts * blocks, groups, kBlockN};
    p.padded_k = groups * p.group;
    check_sizes(w.weight, name, {experts, parts * blocks, groups, p.group * 16 + 128});
    p.scale = static_cast<const float*>(checked(w.scale, name + "_scale", ScalarType::Float, "float32", grid));
    p.zeros = static_cast<const int8_t*>(checked(w.zeros, name + "_zeros", ScalarType::Char, "int8", grid));
    s.weight_stride = blocks * groups * (p.group * 16 + 128);
    s.scale_stride = s.zeros_stride = blocks * groups * kBlockN;
    return s;
  }
  check_absent(w.zeros, name + "_zeros");
  if (kind == Kind::mxfp4) {
    check_absent(w.scale, name + "_scale");
    const int64_t blocks = ceil_div(n, kBlockN), columns = ceil_div(k, kMxfp4Columns);
    check_sizes(w.weight, name, {experts, parts * blocks, columns, kMxfp4Bytes});
    p.padded_k = columns * kMxfp4Columns;
    s.weight_stride = blocks * columns * kMxfp4Bytes;
    return s;
  }
  const int64_t columns = kind == Kind::int8 ? p.padded_k + 4 : p.padded_k;
  check_sizes(w.weight, name, {experts, parts * p.stored_n, columns});
  s.weight_stride = p.stored_n * columns * (kind == Kind::bf16 ? 2 : 1);
  if (kind == Kind::bf16) {
    check_absent(w.scale, name + "_scale");
  } else if (kind == Kind::int8) {
    s.scale_stride = p.stored_n;
    p.scale = static_cast<const float*>(
        checked(w.scale, name + "_scale", ScalarType::Float, "float32", {experts, parts * p.stored_n, 1}));
  } else {
    const int64_t rows = ceil_div(n, 128), scale_columns = ceil_div(k, 128);
    s.scale_stride = rows * scale_columns;
    p.scale = static_cast<const float*>(
        checked(w.scale, name + "_scale", ScalarType::Float, "float32", {experts, parts * rows, scale_columns}));
  }
  return s;
}

Gate gate_of(const std::string& name, double alpha, double limit) {
  const Gate gate{Activation::silu, float(alpha), float(limit)};
  const std::pair<const char*, Activation> known[] = {{"silu", Activation::silu},
                                                      {"gelu", Activation::gelu},
                                                      {"gelu_tanh", Activation::gelu_tanh},
                                                      {"clamped_swiglu", Activation::clamped_swiglu}};
  for (const auto& [id, activation] : known)
    if (name == id) {
      TILEWRIGHT_CHECK(activation != Activation::clamped_swiglu || (std::isfinite(alpha) && limit > 0),
                       "clamped_swiglu needs a finite alpha and a positive limit, they are ", std::to_string(alpha),
                       " and ", std::to_string(limit));
      return {activation, gate.alpha, gate.limit};
    }
  refuse("there is no activation `", name, "`; known are silu, gelu, gelu_tanh, clamped_swiglu");
}

// How the inputs of both matrices are rounded to int8.
struct Rounding {
  int64_t activation_group, w13_rotation, w2_rotation;
};

// x [tokens, hidden] and the matrices around it, all but the scratch memory and the routing.
Experts problem(const Tensor& x, const Weights& w13, const Weights& w2, int64_t experts, int64_t inner,
                bool int8_activations, const std::string& packing, const Rounding& rounding, Tensor& rows) {
  TILEWRIGHT_CHECK(x.dim() == 2 && x.size(1) > 0, "x must be [tokens, hidden], it is ", shape(x));
  TILEWRIGHT_CHECK(inner > 0 && inner <= kMostSize, "inner is ", inner, ", it must be 1 to ", kMostSize);
  check_memory(x, "x");
  const Kind kind = kind_of(w13.weight, int8_activations, packing);
  TILEWRIGHT_CHECK(kind_of(w2.weight, int8_activations, packing) == kind, "w13 and w2 must be packed in the same kind");
  Experts e{};
  e.gate_up = stack_of(kind, w13, experts, 2, inner, x.size(1), packing == kCompact);
  e.down = stack_of(kind, w2, experts, 1, x.size(1), inner, packing == kCompact);
  set_activations(e.gate_up.first.problem, rounding.activation_group, rounding.w13_rotation);
  set_activations(e.down.first.problem, rounding.activation_group, rounding.w2_rotation);
  rows = x.stride(1) == 1 || x.size(1) == 1 ? x : torch::stable::contiguous(x);
  e.tokens.problem.m = x.size(0);
  e.tokens.problem.dtype = float_type(x);
  e.tokens.problem.x = rows.const_data_ptr();
  e.tokens.problem.x_stride = rows.stride(0);
  e.routed_scale = 1;
  return e;
}

const void* offset(const void* p, int64_t elements, Float dtype) {
  return static_cast<const uint8_t*>(p) + elements * (dtype == Float::f32 ? 4 : 2);
}

// Tokens of the pass that begins at `begin`.
int64_t pass_tokens(const Experts& e, const Routing& routing, int64_t begin) {
  const GemmProblem& gate = e.gate_up.first.problem;
  const int64_t most = kPassBytes / (gate.k * (gate.kind == Kind::int8 || gate.kind == Kind::int4_int8 ? 1 : 2));
  const int64_t end = std::min(begin + kPassTokens, routing.tokens);
  int64_t token = begin, rows = 0;
  for (; token < end && (token == begin || rows + routing.top_k <= most); ++token)
    for (int64_t i = 0; i < routing.top_k; ++i) rows += routing.experts[token * routing.top_k + i] >= 0;
  return token - begin;
}

// y is [tokens, hidden] contiguous.
void run(const Experts& whole, int64_t experts, const Routing& routing, Tensor& y) {
  const Isa& isa = tilewright::isa();
  const Blocking cut = blocking(isa);
  const GemmProblem& x = whole.tokens.problem;
  const int64_t hidden = whole.gate_up.first.problem.k;
  for (int64_t begin = 0, tokens; begin < routing.tokens; begin += tokens) {
    tokens = pass_tokens(whole, routing, begin);
    const Float dtype = x.dtype;
    Experts e = whole;
    e.tokens.problem.m = tokens;
    e.tokens.problem.x = offset(x.x, begin * x.x_stride, x.dtype);
    if (e.add) e.add = offset(whole.add, begin * hidden, dtype);
    e.down.first.problem.y = const_cast<void*>(offset(y.mutable_data_ptr(), begin * hidden, dtype));
    const Routing part{routing.experts + begin * routing.top_k, routing.weights + begin * routing.top_k, tokens,
                       routing.top_k};
    ExpertsJob job(isa, cut, e, experts, part, int32_t(torch::stable::get_num_threads()));
    torch::stable::parallel_for(0, job.workers(), 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) job.work();
    });
  }
}

// Numbers within the stack for each choice of each token; -1 where that is none or not in the stack.
template <class Id>
std::vector<int32_t> local_experts(const Tensor& ids, int64_t first, int64_t experts) {
  const Id* id = static_cast<const Id*>(ids.const_data_ptr());
  std::vector<int32_t> local(size_t(ids.numel()));
  for (size_t i = 0; i < local.size(); ++i)
    local[i] = id[i] >= first && id[i] - first < experts ? int32_t(id[i] - first) : -1;
  return local;
}

Tensor fused_experts(const Tensor* out, const Tensor& x, const Tensor& topk_weights, const Tensor& topk_ids,
                     const Tensor& w13, const Tensor& w2, int64_t inner, Optional w13_scale, Optional w2_scale,
                     Optional w13_zeros, Optional w2_zeros, Optional w13_bias, Optional w2_bias,
                     const std::string& activation, double alpha, double limit, double routed_scale,
                     bool int8_activations, int64_t first_expert, int64_t activation_group, int64_t w13_rotation,
                     int64_t w2_rotation, const std::string& packing) {
  TILEWRIGHT_CHECK(w13.dim() >= 3, "w13 must be a stack of experts, it is ", shape(w13));
  const int64_t experts = w13.size(0);
  Tensor rows;
  Experts e = problem(x, {w13, w13_scale, w13_zeros, w13_bias, "w13"}, {w2, w2_scale, w2_zeros, w2_bias, "w2"}, experts,
                      inner, int8_activations, packing, {activation_group, w13_rotation, w2_rotation}, rows);
  e.gate = gate_of(activation, alpha, limit);
  e.routed_scale = float(routed_scale);
  TILEWRIGHT_CHECK(topk_ids.dim() == 2 && topk_ids.size(0) == x.size(0), "topk_ids is ", shape(topk_ids), ", x has ",
                   x.size(0), " tokens");
  TILEWRIGHT_CHECK(shape(topk_weights) == shape(topk_ids), "topk_weights is ", shape(topk_weights), ", topk_ids is ",
                   shape(topk_ids));
  const auto* weights =
      static_cast<const float*>(contiguous_data(topk_weights, "topk_weights", ScalarType::Float, "float32"));
  const bool wide = topk_ids.scalar_type() == ScalarType::Long;
  TILEWRIGHT_CHECK((wide || topk_ids.scalar_type() == ScalarType::Int) && topk_ids.is_contiguous(),
                   "topk_ids must be a contiguous int32 or int64 tensor");
  check_memory(topk_ids, "topk_ids");
  TILEWRIGHT_CHECK(first_expert >= 0, "first_expert is ", first_expert);
  const std::vector<int32_t> ids = wide ? local_experts<int64_t>(topk_ids, first_expert, experts)
                                        : local_experts<int32_t>(topk_ids, first_expert, experts);
  Tensor y = result(x, x.size(1), out,
                    {&topk_weights, &topk_ids, &w13, &w2, pointer(w13_scale), pointer(w2_scale), pointer(w13_zeros),
                     pointer(w2_zeros), pointer(w13_bias), pointer(w2_bias)});
  run(e, experts, {ids.data(), weights, x.size(0), topk_ids.size(1)}, y);
  return y;
}

// Logits [tokens, 1] of any float type -> their sigmoids; ones without logits.
std::vector<float> gate_weights(const Optional& gate, int64_t tokens) {
  std::vector<float> weights(size_t(tokens), 1.0f);
  if (!gate) return weights;
  TILEWRIGHT_CHECK(gate->numel() == tokens && gate->is_contiguous(), "gate is ", shape(*gate), ", it must be [", tokens,
                   ", 1] and contiguous");
  const Float type = float_type(*gate, "gate");
  const void* p = checked_data(*gate, "gate");
  for (size_t t = 0; t < weights.size(); ++t) {
    const float logit = type == Float::f32    ? static_cast<const float*>(p)[t]
                        : type == Float::bf16 ? bf16_to_float(static_cast<const uint16_t*>(p)[t])
                                              : half_to_float(static_cast<const uint16_t*>(p)[t]);
    weights[t] = sigmoid(logit);
  }
  return weights;
}

Tensor fused_mlp(const Tensor* out, const Tensor& x, const Tensor& w13, const Tensor& w2, int64_t inner,
                 Optional w13_scale, Optional w2_scale, Optional w13_zeros, Optional w2_zeros, Optional w13_bias,
                 Optional w2_bias, Optional fused_out, Optional gate, double fused_scale, const std::string& activation,
                 double alpha, double limit, bool int8_activations, int64_t activation_group, int64_t w13_rotation,
                 int64_t w2_rotation, const std::string& packing) {
  TILEWRIGHT_CHECK(x.dim() >= 2 && x.size(-1) > 0, "x must be [..., hidden], it is ", shape(x));
  check_memory(x, "x");
  const int64_t tokens = x.numel() / x.size(-1);
  const Tensor flat = x.dim() == 2 ? x : torch::stable::reshape(x, {tokens, x.size(-1)});
  Tensor rows;
  Experts e = problem(flat, {w13, w13_scale, w13_zeros, w13_bias, "w13"}, {w2, w2_scale, w2_zeros, w2_bias, "w2"}, 1,
                      inner, int8_activations, packing, {activation_group, w13_rotation, w2_rotation}, rows);
  e.gate = gate_of(activation, alpha, limit);
  e.add_scale = float(fused_scale);
  if (fused_out) {
    TILEWRIGHT_CHECK(fused_out->scalar_type() == x.scalar_type() && fused_out->is_contiguous(),
                     "fused_out must be contiguous and of the dtype of x");
    TILEWRIGHT_CHECK(shape(*fused_out) == shape(x), "fused_out is ", shape(*fused_out), ", x is ", shape(x));
    e.add = checked_data(*fused_out, "fused_out");
  }
  const std::vector<int32_t> ids(size_t(tokens), 0);
  const std::vector<float> weights = gate_weights(gate, tokens);
  Tensor y = result(x, x.size(-1), out,
                    {&w13, &w2, pointer(w13_scale), pointer(w2_scale), pointer(w13_zeros), pointer(w2_zeros),
                     pointer(w13_bias), pointer(w2_bias), pointer(gate)});
  if (out && fused_out && out->const_data_ptr() != fused_out->const_data_ptr()) check_apart(*out, {pointer(fused_out)});
  run(e, 1, {ids.data(), weights.data(), tokens, 1}, y);
  return y;
}

// Some rows of one matrix of a batch, from activations to y, on one thread.
void multiply_rows(const Isa& isa, const Blocking& cut, const GemmProblem& p) {
  const GemmPlan plan = isa.plan(&p, 1, &cut);
  const size_t shared = size_t(round_up(int64_t(workspace_bytes(plan, p.m)), 64));
  auto* memory = static_cast<uint8_t*>(scratch(Scratch::own, shared + std::max(plan.prepare_bytes, plan.task_bytes)));
  const Gemm g{p, plan, workspace(plan, p.m, memory)};
  isa.prepare(&g, 0, p.m, memory + shared);
  isa.compute(&g, 0, plan.row_tasks * plan.block_tasks, memory + shared);
}

Tensor bmm(const Tensor& a, const Tensor& weight, int64_t n, Optional scale) {
  TILEWRIGHT_CHECK(a.dim() == 3 && a.size(2) > 0, "a must be [batch, rows, columns], it is ", shape(a));
  TILEWRIGHT_CHECK(n > 0, "n is ", n);
  check_memory(a, "a");
  const int64_t batch = a.size(0), m = a.size(1), k = a.size(2);
  const Kind kind = kind_of(weight, false);
  TILEWRIGHT_CHECK(kind == Kind::bf16 || kind == Kind::fp8, "weight must be packed in bfloat16 or float8_e4m3fn");
  Stack stack = stack_of(kind, {weight, scale, {}, {}, "weight"}, batch, 1, n, k);
  const Tensor rows = a.stride(2) == 1 || k == 1 ? a : torch::stable::contiguous(a);
  Tensor y = torch::stable::new_empty(a, {batch, m, n});
  if (batch == 0 || m == 0) return y;
  stack.first.problem.dtype = float_type(a, "a");
  stack.first.problem.x_stride = rows.stride(1);
  const void* const x = rows.const_data_ptr();
  void* const out = y.mutable_data_ptr();
  constexpr int64_t kTileRows = 192;  // a multiple of every instruction set's groups
  const Isa& isa = tilewright::isa();
  const Blocking cut = blocking(isa);
  const int64_t tiles = ceil_div(m, kTileRows), grain = 1 + (int64_t(1) << 16) / (std::min(m, kTileRows) * n * k);
  torch::stable::parallel_for(0, batch * tiles, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / tiles, row = task % tiles * kTileRows;
      GemmProblem p = stack.first.problem;
      p.weight += b * stack.weight_stride;
      if (p.scale) p.scale += b * stack.scale_stride;
      p.m = std::min(kTileRows, m - row);
      p.x = offset(x, b * rows.stride(0) + row * p.x_stride, p.dtype);
      p.y = const_cast<void*>(offset(out, (b * m + row) * n, p.dtype));
      multiply_rows(isa, cut, p);
    }
  });
  return y;
}

}  // namespace
}  // namespace tilewright

#define TILEWRIGHT_FUSED_EXPERTS                                                                             \
  "(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor w13, Tensor w2, int inner, "                      \
  "Tensor? w13_scale=None, Tensor? w2_scale=None, Tensor? w13_zeros=None, Tensor? w2_zeros=None, "           \
  "Tensor? w13_bias=None, Tensor? w2_bias=None, str activation='silu', float alpha=1.702, float limit=7.0, " \
  "float routed_scale=1.0, bool int8_activations=True, int first_expert=0, "                                 \
  "int activation_group=0, int w13_rotation=0, int w2_rotation=0, str packing=''"
#define TILEWRIGHT_FUSED_MLP                                                                       \
  "(Tensor x, Tensor w13, Tensor w2, int inner, "                                                  \
  "Tensor? w13_scale=None, Tensor? w2_scale=None, Tensor? w13_zeros=None, Tensor? w2_zeros=None, " \
  "Tensor? w13_bias=None, Tensor? w2_bias=None, Tensor? fused_out=None, Tensor? gate=None, "       \
  "float fused_scale=1.0, str activation='silu', float alpha=1.702, float limit=7.0, "             \
  "bool int8_activations=True, int activation_group=0, int w13_rotation=0, int w2_rotation=0, str packing=''"

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("fused_experts" TILEWRIGHT_FUSED_EXPERTS ") -> Tensor");
  m.def("fused_experts.out" TILEWRIGHT_FUSED_EXPERTS ", *, Tensor(a!) out) -> ()");
  m.def("fused_mlp" TILEWRIGHT_FUSED_MLP ") -> Tensor");
  m.def("fused_mlp.out" TILEWRIGHT_FUSED_MLP ", *, Tensor(a!) out) -> ()");
  m.def("bmm(Tensor a, Tensor weight, int n, Tensor? scale=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("fused_experts", TORCH_BOX(&tilewright::Op<tilewright::fused_experts>::fresh));
  m.impl("fused_experts.out", TORCH_BOX(&tilewright::Op<tilewright::fused_experts>::into));
  m.impl("fused_mlp", TORCH_BOX(&tilewright::Op<tilewright::fused_mlp>::fresh));
  m.impl("fused_mlp.out", TORCH_BOX(&tilewright::Op<tilewright::fused_mlp>::into));
  m.impl("bmm", TORCH_BOX(&tilewright::bmm));
}
