#include "lockstep/mean_over_ranks.hpp"

#include <fmt/format.h>

#include <cmath>

#include "lockstep/error.hpp"
#include "lockstep/memory.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

double value_of(const torch::Tensor& value) {
  if (value.defined() && value.numel() == 1) return value.item<double>();
  throw Error(Code::kTensorMismatch,
              fmt::format("a metric is a number, and not {}",
                          value.defined() ? "a tensor of shape " + shape_text(value.sizes())
                                          : "an undefined tensor"),
              "pass a tensor of one element, such as a mean");
}

// Ranks compare labels: a rank that measured something else is an error on all of them.
std::string label_of(const RankMetrics& metrics) {
  std::string label = "mean of";
  for (const auto& [name, value] : metrics) label += " " + name;
  return label;
}

}  // namespace

MetricValue::MetricValue(const torch::Tensor& value) : value_(value_of(value)) {}

std::map<std::string, double> mean_over_ranks(const Communicator& ranks, const RankMetrics& metrics,
                                              double weight) {
  if (!(weight >= 0 && std::isfinite(weight))) {
    throw Error(Code::kUsage, fmt::format("{} cannot be the weight of a mean", weight),
                "a weight is 0 or more, usually the number of rows");
  }
  const ChargeHost host;
  const auto count = static_cast<int64_t>(metrics.size());
  const auto sums = torch::zeros({count + 1}, torch::kFloat64);
  auto* values = sums.data_ptr<double>();
  // The mean over no rows is not a number.
  for (int64_t i = 0; weight > 0 && i < count; ++i) {
    values[i] = weight * metrics[static_cast<size_t>(i)].second.get();
  }
  values[count] = weight;
  ranks.all_reduce(sums, ReduceOp::kSum, {.label = label_of(metrics)});
  if (values[count] == 0) {
    throw Error(Code::kUsage, label_of(metrics) + ": the weights of all ranks are zero",
                "give at least one rank a weight; a weight is usually its number of rows");
  }
  std::map<std::string, double> means;
  for (int64_t i = 0; i < count; ++i) {
    means[metrics[static_cast<size_t>(i)].first] = values[i] / values[count];
  }
  return means;
}

}  // namespace lockstep
