#include "gradients/model_sync.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#define XXH_INLINE_ALL
#include <xxhash.h>
#undef XXH_INLINE_ALL

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <utility>

#include "base/fault.hpp"
#include "base/mutation.hpp"
#include "lockstep/error.hpp"
#include "lockstep/master_weights.hpp"
#include "lockstep/tensor_text.hpp"

namespace lockstep {
namespace {

constexpr int64_t kTogetherBytes = int64_t{4} << 20;  // of small tensors in one message

// Includes the layout: gradients are averaged in the order of their elements in memory.
std::string describe(const NamedTensor& tensor) {
  const std::string layout =
      tensor.tensor.is_contiguous()
          ? ""
          : fmt::format(" with strides {}", shape_text(tensor.tensor.strides()));
  return fmt::format("{} {} {}{}{}{}", tensor.name, dtype_text(tensor.tensor.scalar_type()),
                     shape_text(tensor.tensor.sizes()), layout, tensor.trained ? ", trained" : "",
                     MasterWeights::holding(tensor.tensor) ? ", with a float32 master weight" : "");
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

// How this rank's model differs from that of the group's first rank; "" if it does not.
std::string first_difference(const std::vector<std::string>& first,
                             const std::vector<std::string>& mine, int first_rank, int rank) {
  for (size_t i = 0; i < std::max(first.size(), mine.size()); ++i) {
    const std::string theirs = i < first.size() ? first[i] : "nothing";
    const std::string own = i < mine.size() ? mine[i] : "nothing";
    if (theirs == own) continue;
    return fmt::format("tensor {}: rank {} has {}, rank {} has {}", i, first_rank, theirs, rank,
                       own);
  }
  return "";
}

bool is_sent_alone(const torch::Tensor& tensor) {
  return tensor.is_contiguous() && static_cast<int64_t>(tensor.nbytes()) >= kTogetherBytes;
}

// Packs tensors of one dtype and device into one flat tensor and back.
void broadcast_together(const Communicator& comm, const std::vector<torch::Tensor>& tensors,
                        int root, const char* label) {
  int64_t count = 0;
  for (const auto& tensor : tensors) count += tensor.numel();
  const torch::Tensor flat = torch::empty({count}, tensors.front().options().requires_grad(false));
  const auto each_part = [&](const auto& visit) {
    int64_t offset = 0;
    for (const auto& tensor : tensors) {
      visit(tensor, flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  };
  if (comm.rank() == root) {
    each_part([](const torch::Tensor& tensor, const torch::Tensor& part) { part.copy_(tensor); });
  }
  comm.broadcast(flat, root, {.label = label});
  if (comm.rank() != root) {
    each_part([](const torch::Tensor& tensor, const torch::Tensor& part) { tensor.copy_(part); });
  }
}

int64_t hash_of(const torch::Tensor& tensor) {
  const torch::Tensor plain = tensor.detach().cpu().contiguous();
  return static_cast<int64_t>(XXH3_64bits(plain.data_ptr(), plain.nbytes()));
}

}  // namespace

std::vector<NamedTensor> buffers_of(const torch::nn::Module& module) {
  std::vector<NamedTensor> buffers;
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) buffers.push_back({item.key(), item.value(), false});
  }
  return buffers;
}

std::vector<NamedTensor> model_tensors(const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors;
  for (const auto& item : module.named_parameters()) {
    if (item.value().defined()) {
      tensors.push_back({item.key(), item.value(), item.value().requires_grad()});
    }
  }
  for (auto& buffer : buffers_of(module)) tensors.push_back(std::move(buffer));
  return tensors;
}

std::vector<NamedTensor> trained_in_full_precision(const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors;
  for (auto& [name, parameter] : trained_in(module)) {
    const auto masters = MasterWeights::holding(parameter);
    tensors.push_back({name, masters ? masters->of(parameter) : parameter, true});
  }
  return tensors;
}

void require_same_model(const Communicator& comm, const std::vector<NamedTensor>& tensors) {
  if (comm.size() == 1) return;
  std::string text;
  for (const auto& tensor : tensors) text += describe(tensor) + "\n";
  const std::vector<int> ranks = comm.world_ranks();
  const std::string difference =
      first_difference(lines_of(comm.broadcast_text(text, 0, {.label = "model"})), lines_of(text),
                       ranks[0], ranks[static_cast<size_t>(comm.rank())]);
  for (const std::string& found : comm.all_gather_text(difference, {.label = "model"})) {
    if (found.empty()) continue;
    throw Error(Code::kReplicasDiffer, "the model is not the same on all ranks: " + found,
                "build it with the same sizes, in the same order, on every rank");
  }
}

void broadcast_tensors(const Communicator& comm, const std::vector<NamedTensor>& tensors, int root,
                       const char* label) {
  if (comm.size() == 1) return;
  const torch::NoGradGuard no_grad;
  std::map<std::pair<torch::ScalarType, torch::DeviceIndex>, std::vector<torch::Tensor>> waiting;
  std::map<std::pair<torch::ScalarType, torch::DeviceIndex>, int64_t> waiting_bytes;
  for (const auto& [name, given, trained] : tensors) {
    const torch::Tensor tensor = given.is_complex() ? torch::view_as_real(given) : given;
    if (is_sent_alone(tensor)) {
      comm.broadcast(tensor, root, {.label = label});
      continue;
    }
    const auto key = std::make_pair(tensor.scalar_type(), tensor.device().index());
    auto& together = waiting[key];
    together.push_back(tensor);
    waiting_bytes[key] += static_cast<int64_t>(tensor.nbytes());
    if (waiting_bytes[key] < kTogetherBytes) continue;
    broadcast_together(comm, together, root, label);
    together.clear();
    waiting_bytes[key] = 0;
  }
  for (const auto& [key, together] : waiting) {
    if (!together.empty()) broadcast_together(comm, together, root, label);
  }
}

void broadcast_model(const Communicator& comm, const torch::nn::Module& module, int root,
                     const char* label) {
  auto tensors = model_tensors(module);
  std::vector<std::pair<MasterWeights, torch::Tensor>> held;
  for (auto& each : tensors) {
    const auto masters = MasterWeights::holding(each.tensor);
    if (!masters || is_planted(Mutation::kMastersKeepStart)) continue;
    held.emplace_back(*masters, each.tensor);
    each.tensor = masters->of(each.tensor);
  }
  broadcast_tensors(comm, tensors, root, label);
  for (const auto& [masters, parameter] : held) masters.round(parameter);
}

void require_same_values(const Communicator& comm, const std::vector<NamedTensor>& tensors) {
  if (comm.size() == 1 || tensors.empty()) return;
  const auto count = static_cast<int64_t>(tensors.size());
  const torch::Tensor mine = torch::empty({count}, torch::kInt64);
  for (int64_t i = 0; i < count; ++i) {
    mine.data_ptr<int64_t>()[i] = hash_of(tensors[static_cast<size_t>(i)].tensor);
  }
  const torch::Tensor all = torch::empty({comm.size(), count}, torch::kInt64);
  comm.all_gather(all, mine, {.label = "replica check"});
  const auto hash = [&](int64_t rank, int64_t i) {
    return all.data_ptr<int64_t>()[rank * count + i];
  };
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int> others;
    for (int64_t rank = 1; rank < comm.size(); ++rank) {
      if (hash(rank, i) != hash(0, i)) {
        others.push_back(comm.world_ranks()[static_cast<size_t>(rank)]);
      }
    }
    if (others.empty()) continue;
    throw Error(Code::kReplicasDiffer,
                fmt::format("{} differs between ranks: rank {} disagrees with rank{} {}",
                            tensors[static_cast<size_t>(i)].name, comm.world_ranks()[0],
                            others.size() == 1 ? "" : "s", fmt::join(others, ", ")),
                "change weights by the optimizer only, with the same settings on every rank, and "
                "give every rank the same seed for what they decide together");
  }
}

Deviation largest_deviation(const Communicator& comm, const std::vector<NamedTensor>& tensors) {
  const torch::NoGradGuard no_grad;
  std::vector<NamedTensor> first = tensors;
  for (auto& each : first) each.tensor = each.tensor.detach().clone();
  broadcast_tensors(comm, first, 0, "weights of the first rank");
  std::array<double, 3> mine = {0, 0, 0};  // index of the tensor, difference, magnitude
  const auto largest = [](const torch::Tensor& values) {
    // What is infinite or NaN on both ranks is no difference.
    return values.numel() == 0 ? 0 : values.abs().nan_to_num(0).max().item<double>();
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const double difference = largest(tensors[i].tensor.detach() - first[i].tensor);
    if (difference > mine[1]) mine = {static_cast<double>(i), difference, mine[2]};
    mine[2] = std::max(mine[2], largest(first[i].tensor));
  }
  const torch::Tensor own = torch::tensor(at::ArrayRef<double>(mine), torch::kDouble);
  const torch::Tensor all = torch::empty({comm.size(), 3}, torch::kDouble);
  comm.all_gather(all, own, {.label = "deviation of weights"});
  Deviation deviation;
  const auto rows = all.accessor<double, 2>();
  for (int rank = 0; rank < comm.size(); ++rank) {
    if (rows[rank][1] <= deviation.largest) continue;
    deviation = {tensors[static_cast<size_t>(rows[rank][0])].name,
                 comm.world_ranks()[static_cast<size_t>(rank)], rows[rank][1], rows[rank][2]};
  }
  return deviation;
}

LimitedEmbeddings::LimitedEmbeddings(const torch::nn::Module& module) {
  for (const auto& each : module.named_modules()) {
    const auto add_if_limited = [&](const auto* layer) {
      if (layer == nullptr || !layer->options.max_norm()) return;
      tables_.push_back(
          {each.key(), layer->weight, *layer->options.max_norm(), layer->options.norm_type()});
    };
    add_if_limited(each.value()->template as<torch::nn::Embedding>());
    add_if_limited(each.value()->template as<torch::nn::EmbeddingBag>());
  }
}

void LimitedEmbeddings::shorten_rows() const {
  const torch::NoGradGuard no_grad;
  for (const auto& table : tables_) {
    torch::Tensor weight = table.weight;
    const auto rows = torch::arange(weight.size(0), weight.options().dtype(torch::kInt64));
    torch::embedding_renorm_(weight, rows, table.max_norm, table.norm_type);
  }
}

void call_mismatch(const Communicator& comm) {
  comm.all_reduce(torch::zeros({1}), ReduceOp::kSum, {.label = "injected mismatch"});
}

void inject_faults(const Communicator& comm, const torch::Tensor& gradients) {
  FaultInjector& faults = FaultInjector::of_process();
  if (faults.take(FaultKind::kNan)) {
    gradients.select(0, 0).fill_(std::numeric_limits<double>::quiet_NaN());
  }
  if (faults.take(FaultKind::kMismatch)) call_mismatch(comm);
}

}  // namespace lockstep
