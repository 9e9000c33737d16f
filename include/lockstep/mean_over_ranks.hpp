#pragma once

#include <torch/types.h>

#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/communicator.hpp"

namespace lockstep {

/// A number, or a tensor of one element, whose value is read on the host.
class MetricValue {
 public:
  template <class Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
  MetricValue(Number value) : value_(static_cast<double>(value)) {}
  MetricValue(const torch::Tensor& value);

  double get() const { return value_; }

 private:
  double value_;
};

/// What a rank has measured, by name: {{"loss", loss}, {"accuracy", correct / rows}}.
using RankMetrics = std::vector<std::pair<std::string, MetricValue>>;

/// The mean of each metric over the ranks, in one collective, with the same bits on every rank.
///
///     const auto mean = lockstep::mean_over_ranks(comm, {{"loss", loss}}, rows);
///     if (comm.rank() == 0) std::printf("loss %.4f\n", mean.at("loss"));
///
/// `weight` is usually this rank's number of rows: if each rank gives its mean over its own rows,
/// the result is the mean over all rows, however unevenly they are divided. A rank of weight 0
/// counts for nothing, whatever its values are; kUsage if all are. The names are the same on all
/// ranks, in the same order.
std::map<std::string, double> mean_over_ranks(const Communicator& ranks, const RankMetrics& metrics,
                                              double weight = 1);

}  // namespace lockstep
