#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "base/checksum.hpp"
#include "base/process.hpp"
#include "lockstep/error.hpp"
#include "lockstep/memory.hpp"
#include "train/checkpoint_state.hpp"

// Whether the parts that ranks have added make one checkpoint. Ranks that have a tensor of the same
// name and shape are taken to have the same tensor, of which one copy is saved.

namespace lockstep {

// What failed on one rank fails on all of them: with its own error there, elsewhere with one that
// names it.
void Checkpoint::State::require_on_all_ranks(const std::exception_ptr& error,
                                             const CallOptions& options) const {
  nlohmann::json failure;
  try {
    if (error) std::rethrow_exception(error);
  } catch (const Error& caught) {
    failure = {static_cast<int>(caught.code()), caught.message(), caught.help()};
  } catch (const std::exception& caught) {
    failure = {static_cast<int>(Code::kCheckpoint), first_line_of(describe(caught)), ""};
  }
  if (!control_) {
    if (error) std::rethrow_exception(error);
    return;
  }
  const auto failures =
      control_->all_gather_text(error ? dump_anything(failure) : std::string(), options);
  if (error) std::rethrow_exception(error);
  for (size_t rank = 0; rank < failures.size(); ++rank) {
    if (failures[rank].empty()) continue;
    const auto theirs = nlohmann::json::parse(failures[rank]);
    throw RankError(static_cast<Code>(theirs[0].get<int>()), static_cast<int>(rank),
                    fmt::format("rank {}: {}", rank, theirs[1].get<std::string>()),
                    theirs[2].get<std::string>());
  }
}

std::vector<std::vector<int64_t>> Checkpoint::State::numbers_of_all_ranks(
    const std::vector<int64_t>& mine) const {
  if (!control_) return {mine};
  const ChargeHost host;
  std::vector<std::vector<int64_t>> all;
  for (const auto& theirs :
       control_->all_gather(torch::tensor(mine, torch::kInt64), checkpoint_call())) {
    const auto* first = theirs.data_ptr<int64_t>();
    all.emplace_back(first, first + theirs.numel());
  }
  return all;
}

// The optimizer updates them; without them a run would go on from rounded weights.
void Checkpoint::State::require_masters() const {
  for (const auto& [section, part] : parts_) {
    for (const auto& parameter : part->needs_masters_of()) {
      const bool saved = std::any_of(parts_.begin(), parts_.end(), [&](const Part& each) {
        return each.part->saves_master_of(parameter);
      });
      if (saved) continue;
      throw Error(Code::kUsage,
                  fmt::format("{} updates float32 weights that were not added", section),
                  "add its MasterWeights too: checkpoint.add(\"masters\", masters, module)");
    }
  }
}

// Stages that a program has built one by one often have the same names, such as 0.weight. One of
// them would be saved, and all would load it.
void Checkpoint::State::require_own_names_of_stages() {
  if (names_checked_) return;
  std::exception_ptr error;
  try {
    require_masters();
  } catch (const Error&) {
    error = std::current_exception();
  }
  require_on_all_ranks(error, checkpoint_call());
  names_checked_ = true;
  auto mine = nlohmann::json::array();  // names and stages in turn
  for (const auto& [section, part] : parts_) {
    for (const auto& each : part->stage_tensors()) {
      mine.push_back(section + ": " + each.name);
      mine.push_back(each.stage);
    }
  }
  const auto texts = control_ ? control_->all_gather_text(mine.dump(), checkpoint_call())
                              : std::vector<std::string>{mine.dump()};
  std::map<std::string, int> stage_of;
  for (const auto& text : texts) {
    const auto theirs = nlohmann::json::parse(text);
    for (size_t i = 0; i < theirs.size(); i += 2) {
      const auto name = theirs[i].get<std::string>();
      const int stage = theirs[i + 1].get<int>();
      const int other = stage_of.emplace(name, stage).first->second;
      if (other == stage) continue;
      names_checked_ = false;
      throw Error(Code::kUsage,
                  fmt::format("stages {} and {} of a pipeline both have {}, and a checkpoint has "
                              "one tensor of each name",
                              other, stage, name),
                  "give each layer the name that it has in the whole model, as split_stages() "
                  "does: stage->push_back(\"3\", layer)");
    }
  }
}

// Once for each run, since every rank has to read all its parameters for it.
void Checkpoint::State::warn_of_other_values(const std::vector<ItemToSave>& mine) {
  if (!control_ || std::exchange(values_checked_, true)) return;
  std::vector<int64_t> numbers;  // of a parameter and of its values, in turn
  std::vector<const ItemToSave*> items;
  {
    const ChargeHost host;
    for (const auto& each : mine) {
      if (!each.item.trained) continue;
      const auto values = each.item.tensor.detach().to(torch::kCPU).contiguous();
      const std::string_view bytes(static_cast<const char*>(values.data_ptr()), values.nbytes());
      numbers.push_back(each.number);
      numbers.push_back(static_cast<int64_t>(hash_of(bytes)));
      items.push_back(&each);
    }
  }
  std::map<int64_t, std::pair<int, int64_t>> first;  // [parameter]: a rank that has it, its values
  int rank = 0;
  for (const auto& theirs : numbers_of_all_ranks(numbers)) {
    for (size_t i = 0; i + 1 < theirs.size(); i += 2) {
      const auto& [owner, values] =
          first.emplace(theirs[i], std::pair(rank, theirs[i + 1])).first->second;
      if (values == theirs[i + 1]) continue;
      if (rank != rank_) return;
      const auto& item = *items[i / 2];
      print_error(fmt::format(
          "warning[{}]: {} of {} has other values on rank {} than on rank {}, and the checkpoint "
          "gets those of rank {}; if they are different tensors, add them under different names\n",
          code_name(Code::kReplicasDiffer), item.item.name, item.section, rank, owner, owner));
      return;
    }
    ++rank;
  }
}

}  // namespace lockstep
