#include "comm/fingerprint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "lockstep/error.hpp"
#include "lockstep/units.hpp"

namespace lockstep {
namespace {

constexpr std::array<std::string_view, 14> kOperationNames = {
    "all_reduce", "broadcast", "reduce",     "reduce_scatter", "all_gather",
    "gather",     "scatter",   "all_to_all", "send",           "recv",
    "barrier",    "split",     "allocate",   "allocate_shared"};
constexpr std::array<std::string_view, 4> kReduceNames = {"sum", "mean", "max", "min"};

}  // namespace

int Group::group_rank(int world_rank) const {
  const auto found = std::find(world_ranks.begin(), world_ranks.end(), world_rank);
  return found == world_ranks.end() ? -1 : static_cast<int>(found - world_ranks.begin());
}

Group Group::world(int rank, int size) {
  Group group;
  group.rank = rank;
  group.world_ranks.resize(static_cast<size_t>(size));
  std::iota(group.world_ranks.begin(), group.world_ranks.end(), 0);
  return group;
}

std::string describe_in(const Group& group, const Fingerprint& call) {
  if (group.name == "world") return describe(call);
  return fmt::format("{} in group {}", describe(call), group.name);
}

std::string_view operation_name(Operation operation) {
  return kOperationNames.at(static_cast<size_t>(operation));
}

void Fingerprint::set_label(std::string_view text) {
  const size_t kept = std::min(text.size(), sizeof label - 1);
  std::fill(std::copy_n(text.begin(), kept, label), std::end(label), '\0');
}

bool is_valid(const Fingerprint& call) {
  return static_cast<size_t>(call.operation) < kOperationNames.size() &&
         call.dtype <= Dtype::kF64 && static_cast<size_t>(call.reduce) < kReduceNames.size() &&
         call.label[sizeof call.label - 1] == '\0';
}

bool agree(const Fingerprint& a, const Fingerprint& b) {
  const bool same_data =
      a.sequence == b.sequence && a.count == b.count && a.dtype == b.dtype && a.root == b.root;
  if (a.operation == Operation::kSend) return same_data && b.operation == Operation::kRecv;
  if (a.operation == Operation::kRecv) return same_data && b.operation == Operation::kSend;
  return same_data && a.operation == b.operation && a.reduce == b.reduce &&
         std::equal(std::begin(a.label), std::end(a.label), std::begin(b.label));
}

std::string describe(const Fingerprint& call) {
  std::string text = fmt::format("{} #{}", operation_name(call.operation), call.sequence);
  if (call.label[0] != '\0') text += fmt::format(" ({})", call.label);
  const std::string elements = call.count == Fingerprint::kOwnCounts
                                   ? fmt::format(": {} of different counts", dtype_name(call.dtype))
                                   : fmt::format(": {} x {}", call.count, dtype_name(call.dtype));
  const std::string_view reduction = kReduceNames.at(static_cast<size_t>(call.reduce));
  switch (call.operation) {
    case Operation::kAllReduce:
    case Operation::kReduceScatter:
      return text + elements + fmt::format(", {}", reduction);
    case Operation::kReduce:
      return text + elements + fmt::format(", {}, root {}", reduction, call.root);
    case Operation::kBroadcast:
    case Operation::kGather:
    case Operation::kScatter:
      return text + elements + fmt::format(", root {}", call.root);
    case Operation::kSend:
    case Operation::kRecv:
      return text + elements + fmt::format(", tag {}", call.root);
    case Operation::kAllGather:
    case Operation::kAllToAll:
      return text + elements;
    case Operation::kAllocate:
    case Operation::kAllocateShared:
      return text + ": " + format_bytes(call.count);
    case Operation::kBarrier:
    case Operation::kSplit:
      return text;
  }
  return text;
}

std::vector<double> mean_factors(std::span<const Fingerprint> calls) {
  if (calls.front().reduce != ReduceOp::kMean) return {};
  std::vector<double> weights;
  weights.reserve(calls.size());
  for (const Fingerprint& call : calls) weights.push_back(call.weight);
  return mean_factors(calls.front(), std::move(weights));
}

std::vector<double> mean_factors(const Fingerprint& call, std::vector<double> weights) {
  double total = 0;
  for (const double weight : weights) total += weight;
  if (total == 0) {
    throw Error(Code::kUsage, describe(call) + ": the weights of all ranks are zero",
                "give at least one rank a weight; a weight is usually its number of samples");
  }
  for (double& weight : weights) weight /= total;
  return weights;
}

}  // namespace lockstep
