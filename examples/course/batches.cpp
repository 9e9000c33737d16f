#include "course/batches.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>

#include "lockstep/error.hpp"
#include "lockstep/tensor_file.hpp"
#include "lockstep/tensor_text.hpp"

namespace course {
namespace {

using lockstep::Code;
using lockstep::Error;

const torch::Tensor& require_rows(const lockstep::TensorMap& file, const std::string& path,
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

}  // namespace

Batches::Batches(const Options& options, torch::Device device)
    : batch_(options.batch), dim_(options.dim), seed_(options.seed), device_(device) {
  if (options.data.empty()) return;
  const auto file = lockstep::load_tensors(options.data);
  x_ = require_rows(file, options.data, "x", dim_);
  y_ = require_rows(file, options.data, "y", dim_);
  if (x_.size(0) != y_.size(0)) {
    throw Error(
        Code::kTensorMismatch,
        fmt::format("--data {}: x has {} rows, y has {}", options.data, x_.size(0), y_.size(0)),
        "save as many rows of y as of x");
  }
}

Batch Batches::get_rows(int64_t index, int64_t first, int64_t count) const {
  Batch batch;
  if (x_.defined()) {
    batch = take_rows(index * batch_ + first, count);
  } else {
    // The whole batch is drawn, so that a row is the same whoever asks for it.
    batch = generate(index);
    if (count != batch_) {
      batch.x = batch.x.narrow(0, first, count).clone();
      batch.y = batch.y.narrow(0, first, count).clone();
    }
  }
  return {batch.x.to(device_), batch.y.to(device_)};
}

// Made on the CPU whatever the device, so that the numbers are the same everywhere. A few hidden
// factors make both x and y, so that a model learns something within a lesson.
Batch Batches::generate(int64_t index) const {
  const auto first_seed = static_cast<uint64_t>(seed_) * 1'000'003;
  const int64_t factors = std::min<int64_t>(4, dim_);
  auto fixed = at::detail::createCPUGenerator(first_seed);
  const torch::Tensor to_x = torch::randn({factors, dim_}, fixed);
  const torch::Tensor to_y = torch::randn({factors, dim_}, fixed);
  auto of_batch = at::detail::createCPUGenerator(first_seed + 1 + static_cast<uint64_t>(index));
  const torch::Tensor hidden = torch::randn({batch_, factors}, of_batch);
  return {hidden.mm(to_x), torch::tanh(hidden.mm(to_y))};
}

Batch Batches::take_rows(int64_t first, int64_t count) const {
  const torch::Tensor rows = (torch::arange(count) + first).remainder(x_.size(0));
  return {x_.index_select(0, rows), y_.index_select(0, rows)};
}

}  // namespace course
