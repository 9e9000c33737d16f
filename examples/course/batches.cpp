#include "course/batches.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/error.hpp"
#include "lockstep/memory.hpp"
#include "lockstep/tensor_file.hpp"
#include "lockstep/tensor_text.hpp"

namespace course {
namespace {

using lockstep::Code;
using lockstep::Error;

const torch::Tensor& require_tensor(const lockstep::TensorMap& file, const std::string& path,
                                    const char* name, int64_t dim) {
  const auto found = file.find(name);
  if (found == file.end()) {
    throw Error(Code::kTensorMismatch, fmt::format("--data {} has no tensor \"{}\"", path, name),
                "save tensors x and y, one sample a row");
  }
  const torch::Tensor& tensor = found->second;
  if (tensor.scalar_type() != torch::kFloat32) {
    throw Error(Code::kTensorMismatch,
                fmt::format("tensor \"{}\" of --data {} is {}, not float32", name, path,
                            lockstep::dtype_text(tensor.scalar_type())),
                "save it as float32");
  }
  if (tensor.dim() != 2 || tensor.size(0) == 0 || tensor.size(1) != dim) {
    throw Error(Code::kTensorMismatch,
                fmt::format("tensor \"{}\" of --data {} is {}, not [rows, {}]", name, path,
                            lockstep::shape_text(tensor.sizes()), dim),
                tensor.dim() == 2
                    ? fmt::format("set --dim {} or save another width", tensor.size(1))
                    : "save one sample a row");
  }
  return tensor;
}

// A hash whose outputs look random (splitmix64).
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

// Normal numbers [rows, columns] from row number `first` on. A number depends only on the seed and
// its index: k batches of B rows are the rows of one batch of k * B.
torch::Tensor draw_rows(uint64_t seed, int64_t first, int64_t rows, int64_t columns) {
  const torch::Tensor drawn = torch::empty({rows, columns});
  float* number = drawn.data_ptr<float>();
  const uint64_t key = mix(seed);
  const auto uniform = [key](int64_t index) {  // in (0, 1)
    return (static_cast<double>(mix(key ^ static_cast<uint64_t>(index)) >> 11U) + 0.5) * 0x1p-53;
  };
  for (int64_t index = first * columns; index < (first + rows) * columns; ++index) {
    const double radius = std::sqrt(-2 * std::log(uniform(2 * index)));
    *number++ = static_cast<float>(radius * std::cos(2 * M_PI * uniform(2 * index + 1)));
  }
  return drawn;
}

}  // namespace

Batches::Batches(const Options& options, torch::Device device)
    : batch_(options.batch),
      accum_steps_(options.accum_steps),
      dim_(options.dim),
      seed_(options.seed),
      device_(device) {
  if (options.data.empty()) return;
  const auto file = lockstep::load_tensors(options.data);
  x_ = require_tensor(file, options.data, "x", dim_);
  y_ = require_tensor(file, options.data, "y", dim_);
  if (x_.size(0) != y_.size(0)) {
    throw Error(
        Code::kTensorMismatch,
        fmt::format("--data {}: x has {} rows, y has {}", options.data, x_.size(0), y_.size(0)),
        "save as many rows of y as of x");
  }
}

Batch Batches::get_rows(int64_t index, RowBlock rows) const {
  const Batch batch = get_host_rows(index, rows);
  return {batch.x.to(device_), batch.y.to(device_)};
}

StepBatches Batches::draw(int64_t step, RowBlock rows) const {
  const lockstep::ChargeHost host;
  std::vector<torch::Tensor> tensors;
  for (int64_t micro = 0; micro < accum_steps_; ++micro) {
    const Batch batch = get_host_rows(step * accum_steps_ + micro, rows);
    tensors.push_back(batch.x);
    tensors.push_back(batch.y);
  }
  return {std::move(tensors), device_};
}

Batch Batches::get_host_rows(int64_t index, RowBlock rows) const {
  if (x_.defined()) return take_rows(index * batch_ + rows.first, rows.count);
  // The whole batch is generated, so that a row is the same for whoever asks for it.
  const Batch batch = generate(index);
  if (rows.count == batch_) return batch;
  return {batch.x.narrow(0, rows.first, rows.count).clone(),
          batch.y.narrow(0, rows.first, rows.count).clone()};
}

// Generated on the CPU whatever the device, so that the numbers are the same everywhere. A few
// hidden factors determine both x and y, so that a model learns something within a lesson.
Batch Batches::generate(int64_t index) const {
  const auto first_seed = static_cast<uint64_t>(seed_) * 1'000'003;
  const int64_t factors = std::min<int64_t>(4, dim_);
  auto fixed = at::detail::createCPUGenerator(first_seed);
  const torch::Tensor to_x = torch::randn({factors, dim_}, fixed);
  const torch::Tensor to_y = torch::randn({factors, dim_}, fixed);
  const torch::Tensor hidden = draw_rows(first_seed, index * batch_, batch_, factors);
  return {hidden.mm(to_x), torch::tanh(hidden.mm(to_y))};
}

Batch Batches::take_rows(int64_t first, int64_t count) const {
  const torch::Tensor rows = (torch::arange(count) + first).remainder(x_.size(0));
  return {x_.index_select(0, rows), y_.index_select(0, rows)};
}

RowBlock rows_of_rank(int64_t batch, int rank, int ranks) {
  const int64_t whole = batch / ranks;
  const int64_t left_over = batch % ranks;
  return {.first = rank * whole + std::min<int64_t>(rank, left_over),
          .count = whole + (rank < left_over ? 1 : 0)};
}

std::vector<torch::Tensor> StepBatches::on_device() const {
  std::vector<torch::Tensor> copies;
  for (const auto& tensor : tensors_) copies.push_back(tensor.to(device_));
  return copies;
}

Batch StepBatches::get(int64_t micro) const {
  const auto copy = [this](int64_t i) {
    const torch::Tensor& tensor = tensors_.at(static_cast<size_t>(i));
    return tensor.to(device_, tensor.scalar_type(), /*non_blocking=*/false,
                     /*copy=*/tensor.is_cpu());
  };
  const Batch batch = {copy(2 * micro), copy(2 * micro + 1)};
  if (on_get_) on_get_();
  return batch;
}

}  // namespace course
