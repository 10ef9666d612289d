// The torch operators of conversion: checks, memory and threads around the loops of cpu/convert.
#include <algorithm>
#include <string>
#include <vector>

#include "bindings.h"
#include "cpu/convert/table.h"
#include "cpu/dispatch.h"

namespace tilewright {
namespace {

Code code_of(const std::string& name) {
  TILEWRIGHT_CHECK(name == "fp8" || name == "int8" || name == "int4", "there are no codes `", name,
                   "`; known are fp8, int8, int4");
  return name == "fp8" ? Code::fp8 : name == "int8" ? Code::int8 : Code::int4;
}

ScalarType type_of(Code code) {
  return code == Code::fp8 ? ScalarType::Float8_e4m3fn : code == Code::int8 ? ScalarType::Char : ScalarType::Byte;
}

constexpr int64_t kMostBlock = 1 << 16;  // rows or columns that share a scale, where a matrix has fewer of them

int64_t checked_block(int64_t block, int64_t size, const char* what) {
  TILEWRIGHT_CHECK(block >= 0 && block <= std::max(size, kMostBlock), "blocks of ", block, " ", what,
                   ": give 0 for all, or at most ", std::max(size, kMostBlock));
  return block ? block : size;
}

Blocks blocks_of(const Tensor& x, int64_t block_n, int64_t block_k) {
  TILEWRIGHT_CHECK(x.dim() == 2 && x.size(0) > 0 && x.size(1) > 0, "a matrix with elements is needed");
  TILEWRIGHT_CHECK(x.stride(1) == 1 || x.size(1) == 1, "the elements of a row must lie side by side");
  Blocks b{};
  b.data = checked_data(x, "the matrix");
  b.n = checked_size(x.size(0), "the number of rows");
  b.k = checked_size(x.size(1), "the number of columns");
  b.stride = x.stride(0);
  b.block_n = checked_block(block_n, b.n, "rows");
  b.block_k = checked_block(block_k, b.k, "columns");
  return b;
}

Blocks weight_of(const Tensor& weight, int64_t block_n, int64_t block_k) {
  Blocks b = blocks_of(weight, block_n, block_k);
  b.dtype = float_type(weight, "weight");
  return b;
}

const float* checked_scales(const Tensor& scales, const Blocks& b, int64_t rows) {
  TILEWRIGHT_CHECK(scales.scalar_type() == ScalarType::Float && scales.is_contiguous() && scales.dim() == 2 &&
                       scales.size(0) >= rows && scales.size(1) == b.columns(),
                   "scales must be contiguous float32 [", rows, ", ", b.columns(), "]");
  return static_cast<const float*>(checked_data(scales, "scales"));
}

// A thread is worth its start for about 2^16 numbers.
template <class F>
void parallel_rows(const Blocks& b, F f) {
  const int64_t grain = 1 + (int64_t(1) << 16) / (std::min(b.block_n, b.n) * b.k);
  torch::stable::parallel_for(0, b.rows(), grain, f);
}

Tensor empty(const Tensor& like, std::vector<int64_t> sizes, ScalarType type) {
  return torch::stable::new_empty(like, sizes, type);
}

Tensor block_amax(const Tensor& weight, int64_t block_n, int64_t block_k) {
  const bool e4m3 = weight.scalar_type() == ScalarType::Float8_e4m3fn;
  Blocks b = e4m3 ? blocks_of(weight, block_n, block_k) : weight_of(weight, block_n, block_k);
  if (e4m3) b.dtype = Float::e4m3;
  Tensor out = empty(weight, {b.rows(), b.columns()}, ScalarType::Float);
  auto* data = static_cast<float*>(out.mutable_data_ptr());
  const Convert& c = convert();
  parallel_rows(b, [&](int64_t begin, int64_t end) { c.block_amax(&b, begin, end, data); });
  return out;
}

Tensor encode(const Tensor& weight, const Tensor& scales, const std::string& name, int64_t block_n, int64_t block_k) {
  const Blocks b = weight_of(weight, block_n, block_k);
  const float* s = checked_scales(scales, b, b.rows());
  const Code code = code_of(name);
  Tensor out = empty(weight, {b.n, b.k}, type_of(code));
  auto* data = static_cast<uint8_t*>(out.mutable_data_ptr());
  const Convert& c = convert();
  parallel_rows(b, [&](int64_t begin, int64_t end) { c.encode(&b, s, code, begin, end, data); });
  return out;
}

Tensor squared_error(const Tensor& weight, const Tensor& scales, const std::string& name, int64_t block_n,
                     int64_t block_k) {
  const Blocks b = weight_of(weight, block_n, block_k);
  const float* s = checked_scales(scales, b, b.rows());
  const Code code = code_of(name);
  Tensor out = empty(weight, {b.rows(), b.columns()}, ScalarType::Float);
  auto* data = static_cast<float*>(out.mutable_data_ptr());
  const Convert& c = convert();
  parallel_rows(b, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(size_t(error_scratch(b)));
    c.squared_error(&b, s, code, begin, end, scratch.data(), data);
  });
  return out;
}

Tensor scale_codes(const Tensor& codes, const Tensor& scales, const std::string& name, int64_t block_n, int64_t block_k,
                   int64_t row0) {
  const Blocks b = blocks_of(codes, block_n, block_k);
  const Code code = code_of(name);
  TILEWRIGHT_CHECK(codes.scalar_type() == type_of(code), "codes do not have the dtype of `", name, "`");
  checked_size(row0, "row0");
  const float* s = checked_scales(scales, b, (row0 + b.n - 1) / b.block_n + 1);
  Tensor out = empty(codes, {b.n, b.k}, ScalarType::Float);
  convert().scale_codes(&b, s, code, row0, static_cast<float*>(out.mutable_data_ptr()));
  return out;
}

Tensor code_errors(const Tensor& weight, const Tensor& codes, const Tensor& scales, const Tensor& ideal,
                   const std::string& name, int64_t block_n, int64_t block_k) {
  Comparison c{};
  c.weight = weight_of(weight, block_n, block_k);
  const Blocks& b = c.weight;
  const Code code = code_of(name);
  TILEWRIGHT_CHECK(codes.scalar_type() == type_of(code) && codes.is_contiguous() && codes.dim() == 2 &&
                       codes.size(0) == b.n && codes.size(1) == b.k,
                   "codes must be those of `", name, "`, contiguous [", b.n, ", ", b.k, "]");
  c.codes = static_cast<const uint8_t*>(checked_data(codes, "codes"));
  c.scales = checked_scales(scales, b, b.rows());
  c.ideal = checked_scales(ideal, b, b.rows());
  Tensor out = empty(weight, {b.rows(), b.columns(), kMeasures}, ScalarType::Double);
  c.out = static_cast<double*>(out.mutable_data_ptr());
  std::fill_n(c.out, b.rows() * b.columns() * kMeasures, 0.0);
  const Convert& loops = convert();
  parallel_rows(b, [&](int64_t begin, int64_t end) { loops.code_errors(&c, code, begin, end); });
  return out;
}

Tensor join_nibbles(const Tensor& codes) {
  TILEWRIGHT_CHECK(
      codes.scalar_type() == ScalarType::Byte && codes.is_contiguous() && codes.dim() >= 1 && codes.size(-1) % 2 == 0,
      "codes must be contiguous uint8 with an even number of columns");
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < codes.dim(); ++i) sizes.push_back(codes.size(i));
  sizes.back() /= 2;
  Tensor out = empty(codes, sizes, ScalarType::Byte);
  convert().join_nibbles(static_cast<const uint8_t*>(checked_data(codes, "codes")), out.numel(),
                         static_cast<uint8_t*>(out.mutable_data_ptr()));
  return out;
}

Tensor split_nibbles(const Tensor& joined, int64_t flip) {
  TILEWRIGHT_CHECK(joined.scalar_type() == ScalarType::Byte && joined.is_contiguous() && joined.dim() >= 1,
                   "joined must be contiguous uint8");
  TILEWRIGHT_CHECK(flip >= 0 && flip < 16, "flip is ", flip);
  TILEWRIGHT_CHECK(joined.size(-1) < INT64_MAX / 2, "joined has too many columns");
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < joined.dim(); ++i) sizes.push_back(joined.size(i));
  sizes.back() *= 2;
  Tensor out = empty(joined, sizes, ScalarType::Byte);
  convert().split_nibbles(static_cast<const uint8_t*>(checked_data(joined, "joined")), joined.numel(), uint8_t(flip),
                          static_cast<uint8_t*>(out.mutable_data_ptr()));
  return out;
}

constexpr int64_t kMostPadding = 256;  // columns

// [parts, n, columns] of 1- or 2-byte codes.
Words words_of(const Tensor& codes, int64_t columns) {
  TILEWRIGHT_CHECK(codes.dim() == 3 && codes.is_contiguous() && codes.numel() > 0,
                   "codes must be contiguous [parts, n, k] with elements");
  const ScalarType type = codes.scalar_type();
  TILEWRIGHT_CHECK(type == ScalarType::Byte || type == ScalarType::Char || type == ScalarType::Short,
                   "codes must be uint8, int8 or int16");
  TILEWRIGHT_CHECK(columns >= codes.size(2) && columns - codes.size(2) < kMostPadding, "columns is ", columns,
                   ", codes have ", codes.size(2), " and are padded by less than ", kMostPadding);
  const int64_t bytes = type == ScalarType::Short ? 2 : 1;
  Words w{};
  w.data = static_cast<const uint8_t*>(checked_data(codes, "codes"));
  w.parts = codes.size(0);
  w.n = codes.size(1);
  w.row_bytes = codes.size(2) * bytes;
  w.padded_bytes = columns * bytes;
  return w;
}

// A thread is worth its start for about 2^17 bytes.
template <class F>
void parallel_blocks(const Words& w, F f) {
  torch::stable::parallel_for(0, w.blocks(), 1 + (int64_t(1) << 17) / (kBlockN * w.padded_bytes), f);
}

Tensor pack_words(const Tensor& codes, int64_t columns, int64_t word, bool compensation) {
  Words w = words_of(codes, columns);
  TILEWRIGHT_CHECK((word == 2 || word == 4) && w.padded_bytes % word == 0, "words of ", word, " bytes, rows of ",
                   w.padded_bytes);
  TILEWRIGHT_CHECK(!compensation || w.padded_bytes == columns, "a compensation needs 8-bit codes");
  w.word = word;
  w.compensation = compensation;
  const int64_t rows = w.blocks() / w.parts * kBlockN;
  Tensor out = empty(codes, {w.parts, rows, columns + (compensation ? 4 : 0)}, codes.scalar_type());
  auto* data = static_cast<uint8_t*>(out.mutable_data_ptr());
  const Convert& c = convert();
  parallel_blocks(w, [&](int64_t begin, int64_t end) { c.pack_words(&w, begin, end, data); });
  return out;
}

Tensor pack_int4(const Tensor& codes, const Tensor& zeros, int64_t block_k, int64_t group) {
  TILEWRIGHT_CHECK(
      (block_k == 32 || block_k == 64 || block_k == 128) && group % block_k == 0 && group > 0 && group <= kMostBlock,
      "blocks of ", block_k, " columns in groups of ", group);
  TILEWRIGHT_CHECK(codes.scalar_type() == ScalarType::Byte && codes.dim() == 3, "codes must be uint8 [parts, n, k]");
  const int64_t column_blocks = (codes.size(2) + block_k - 1) / block_k;
  const Words w = words_of(codes, column_blocks * block_k);
  const int64_t groups = (w.row_bytes + group - 1) / group;
  TILEWRIGHT_CHECK(
      zeros.scalar_type() == ScalarType::Byte && zeros.is_contiguous() && zeros.numel() == w.parts * w.n * groups,
      "zeros must be contiguous uint8 [", w.parts, ", ", w.n, ", ", groups, "]");
  Tensor out = empty(codes, {w.blocks(), column_blocks, block_k * 16 + 128}, ScalarType::Byte);
  auto* data = static_cast<uint8_t*>(out.mutable_data_ptr());
  const auto* z = static_cast<const uint8_t*>(checked_data(zeros, "zeros"));
  const Convert& c = convert();
  parallel_blocks(w, [&](int64_t begin, int64_t end) { c.pack_int4(&w, z, block_k, group, begin, end, data); });
  return out;
}

}  // namespace
}  // namespace tilewright

STABLE_TORCH_LIBRARY_FRAGMENT(tilewright, m) {
  m.def("block_amax(Tensor weight, int block_n, int block_k) -> Tensor");
  m.def("encode(Tensor weight, Tensor scales, str codes, int block_n, int block_k) -> Tensor");
  m.def("squared_error(Tensor weight, Tensor scales, str codes, int block_n, int block_k) -> Tensor");
  m.def("scale_codes(Tensor codes, Tensor scales, str kind, int block_n, int block_k, int row0) -> Tensor");
  m.def(
      "code_errors(Tensor weight, Tensor codes, Tensor scales, Tensor ideal, str grid, int block_n, int block_k) -> "
      "Tensor");
  m.def("join_nibbles(Tensor codes) -> Tensor");
  m.def("split_nibbles(Tensor joined, int flip) -> Tensor");
  m.def("pack_words(Tensor codes, int columns, int word, bool compensation) -> Tensor");
  m.def("pack_int4(Tensor codes, Tensor zeros, int block_k, int group) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tilewright, CPU, m) {
  m.impl("block_amax", TORCH_BOX(&tilewright::block_amax));
  m.impl("encode", TORCH_BOX(&tilewright::encode));
  m.impl("squared_error", TORCH_BOX(&tilewright::squared_error));
  m.impl("scale_codes", TORCH_BOX(&tilewright::scale_codes));
  m.impl("code_errors", TORCH_BOX(&tilewright::code_errors));
  m.impl("join_nibbles", TORCH_BOX(&tilewright::join_nibbles));
  m.impl("split_nibbles", TORCH_BOX(&tilewright::split_nibbles));
  m.impl("pack_words", TORCH_BOX(&tilewright::pack_words));
  m.impl("pack_int4", TORCH_BOX(&tilewright::pack_int4));
}
