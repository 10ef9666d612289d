// The queue of an expert layer under ThreadSanitizer, without torch: many small layers, on one thread and on several,
// whose results must be the same bits. `planted` as the first argument adds a race that must be reported.
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/experts_job.h"

extern "C" const tilewright::Isa tilewright_isa_portable;

namespace {
using namespace tilewright;

struct Layer {
  int64_t tokens, hidden, inner, experts, top_k;
  Kind kind;
  std::vector<uint8_t> gate_up, down;
  std::vector<float> gate_up_scale, down_scale, x, weights;
  std::vector<int32_t> ids;
};

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

std::vector<uint8_t> random_weights(std::mt19937& random, Kind kind, int64_t rows, int64_t k) {
  const int64_t columns = round_up(k, 32) + (kind == Kind::int8 ? 4 : 0);
  std::vector<uint8_t> bytes(size_t(rows * columns * (kind == Kind::bf16 ? 2 : 1)));
  for (uint8_t& byte : bytes) byte = uint8_t(random() & 0x3f);  // bf16 below 1
  return bytes;
}

Layer make_layer(uint32_t seed, Kind kind) {
  std::mt19937 random(seed);
  const auto draw = [&](int64_t low, int64_t high) { return low + int64_t(random() % uint32_t(high - low + 1)); };
  Layer layer{draw(1, 60), draw(40, 100), draw(33, 90), draw(1, 7), draw(1, 3), kind, {}, {}, {}, {}, {}, {}, {}};
  const int64_t inner = round_up(layer.inner, 32), hidden = round_up(layer.hidden, 32);
  layer.gate_up = random_weights(random, kind, layer.experts * 2 * inner, layer.hidden);
  layer.down = random_weights(random, kind, layer.experts * hidden, layer.inner);
  layer.gate_up_scale.assign(size_t(layer.experts * 2 * inner), 0.01f);
  layer.down_scale.assign(size_t(layer.experts * hidden), 0.02f);
  for (int64_t i = 0; i < layer.tokens * layer.hidden; ++i) layer.x.push_back(float(random() % 2001) / 1000 - 1);
  for (int64_t i = 0; i < layer.tokens * layer.top_k; ++i) {
    layer.ids.push_back(int32_t(draw(-1, layer.experts - 1)));
    layer.weights.push_back(float(random() % 100) / 100);
  }
  return layer;
}

Stack stack_of(const Layer& layer, const std::vector<uint8_t>& weight, const std::vector<float>& scale, int64_t n,
               int64_t k) {
  Stack s{};
  GemmProblem& p = s.first.problem;
  p.kind = layer.kind, p.n = n, p.k = k, p.stored_n = round_up(n, 32), p.padded_k = round_up(k, 32);
  p.weight = weight.data();
  const int64_t columns = p.padded_k + (layer.kind == Kind::int8 ? 4 : 0);
  s.weight_stride = p.stored_n * columns * (layer.kind == Kind::bf16 ? 2 : 1);
  if (layer.kind == Kind::int8) p.scale = scale.data(), s.scale_stride = p.stored_n;
  return s;
}

std::vector<float> run(const Layer& layer, int32_t threads, bool planted) {
  std::vector<float> y(size_t(layer.tokens * layer.hidden), -1.0f);
  Experts e{};
  e.gate_up = stack_of(layer, layer.gate_up, layer.gate_up_scale, layer.inner, layer.hidden);
  e.down = stack_of(layer, layer.down, layer.down_scale, layer.hidden, layer.inner);
  e.gate = {Activation::silu, 1.0f, 1.0f};
  GemmProblem& tokens = e.tokens.problem;
  tokens.m = layer.tokens, tokens.dtype = Float::f32, tokens.x = layer.x.data(), tokens.x_stride = layer.hidden;
  e.routed_scale = 1;
  e.down.first.problem.y = y.data();
  const Isa& isa = tilewright_isa_portable;
  const Routing routing{layer.ids.data(), layer.weights.data(), layer.tokens, layer.top_k};
  ExpertsJob job(isa, *isa.blocking, e, layer.experts, routing, threads);
  int64_t unguarded = 0;
  std::vector<std::thread> others;
  for (int64_t i = 1; i < job.workers(); ++i)
    others.emplace_back([&] {
      if (planted) ++unguarded;
      job.work();
    });
  if (planted) ++unguarded;
  job.work();
  for (std::thread& other : others) other.join();
  return y;
}

}  // namespace

int main(int count, char** arguments) {
  const bool planted = count > 1 && std::string(arguments[1]) == "planted";
  int64_t together = 0;
  for (uint32_t seed = 0; seed < 60; ++seed)
    for (Kind kind : {Kind::bf16, Kind::int8}) {
      const Layer layer = make_layer(seed, kind);
      const std::vector<float> alone = run(layer, 1, false), shared = run(layer, 4, planted);
      if (std::memcmp(alone.data(), shared.data(), alone.size() * sizeof(float))) {
        std::printf("layer %u differs\n", seed);
        return 1;
      }
      ++together;
    }
  std::printf("%ld layers are the same bits on one thread and on four\n", long(together));
}
