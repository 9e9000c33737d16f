#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <set>

#include "base/checksum.hpp"
#include "base/counted.hpp"
#include "base/process.hpp"
#include "lockstep/error.hpp"
#include "train/checkpoint_state.hpp"
#include "verify/step_recorder.hpp"

namespace lockstep {

// What is damaged in a checkpoint; empty: nothing. Each rank reads every n-th file. A file that
// cannot be read is no damage, but an Error: the checkpoint may be good.
std::string Checkpoint::State::check(const std::string& path,
                                     std::optional<CheckpointReader>& reader) const {
  try {
    reader.emplace(path);
    for (size_t i = static_cast<size_t>(rank_); i < reader->manifest().files.size();
         i += static_cast<size_t>(size_)) {
      reader->verify_file(i);
    }
    return "";
  } catch (const Error& error) {
    if (!is_damage(error)) throw;
    return error.message();
  }
}

int64_t Checkpoint::State::resume() {
  wait_for_save();
  latest_step_.reset();
  require_own_names_of_stages();
  auto paths = nlohmann::json::array();
  if (is_writer()) {
    auto entries = list_checkpoints(folder_);
    for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
      paths.push_back(entry->path);
    }
  }
  if (control_)
    paths = nlohmann::json::parse(control_->broadcast_text(paths.dump(), 0, checkpoint_call()));
  std::vector<std::string> refused;
  for (const auto& candidate : paths) {
    const auto path = candidate.get<std::string>();
    std::optional<CheckpointReader> reader;
    std::string reason;
    std::exception_ptr unreadable;
    try {
      reason = check(path, reader);
    } catch (const std::exception&) {
      unreadable = std::current_exception();
    }
    require_on_all_ranks(unreadable, files_call(control_));
    if (control_) {
      for (const auto& text : control_->all_gather_text(reason, checkpoint_call())) {
        if (reason.empty()) reason = text;
      }
    }
    if (reason.empty()) {
      load(*reader);
      latest_step_ = reader->manifest().step;
      set_resumed_steps(reader->manifest().step);
      if (auto* recorder = StepRecorder::of_process()) {
        recorder->resume_after(reader->manifest().step);
      }
      return reader->manifest().step;
    }
    refused.push_back(reason);
    if (is_writer()) {
      print_error(fmt::format("lockstep: {} is damaged and passed over: {}\n", path, reason));
    }
  }
  if (refused.empty()) {
    set_resumed_steps(0);
    return 0;
  }
  throw Error(Code::kFileFormat, fmt::format("no checkpoint of {} is good", folder_),
              "remove or repair the folder; without any checkpoint the run starts anew", refused);
}

void Checkpoint::State::load(const CheckpointReader& reader) {
  std::vector<SectionSource> sources;
  std::vector<std::function<void()>> apply;
  std::exception_ptr error;
  try {
    find_gpus();
    for (size_t i = 1; i <= parts_.size(); ++i) {  // random numbers last
      auto& [section, part] = parts_[i % parts_.size()];
      auto& source = sources.emplace_back(reader, section, rank_, size_);
      apply.push_back(part->load(source));
    }
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  require_on_all_ranks(error, files_call(control_));  // all load it, or none
  require_all_used(reader, sources);
  for (const auto& each : apply) each();
}

// A tensor that nobody has asked for belongs to another model. Sections that nobody has added may
// be left out on purpose, as an evaluation leaves out the optimizer.
void Checkpoint::State::require_all_used(const CheckpointReader& reader,
                                         const std::vector<SectionSource>& sources) const {
  const auto number = [](const std::string& section, const std::string& name) {
    return static_cast<int64_t>(hash_of(section + "/" + name));
  };
  std::set<std::string> added;
  std::vector<int64_t> mine;
  for (const auto& source : sources) {
    added.insert(source.section());
    for (const auto& name : source.used()) mine.push_back(number(source.section(), name));
  }
  std::set<int64_t> used;
  for (const auto& numbers : numbers_of_all_ranks(mine)) {
    used.insert(numbers.begin(), numbers.end());
  }
  std::vector<std::string> extra;
  std::set<std::string> unknown;
  for (const auto& tensor : reader.manifest().tensors) {
    if (added.count(tensor.section) == 0) {
      unknown.insert(tensor.section);
    } else if (tensor.section != kRandomSection &&
               used.count(number(tensor.section, tensor.name)) == 0) {
      extra.push_back(tensor.section + ": " + tensor.name);
    }
  }
  for (const auto& [section, value] : reader.manifest().values.items()) {
    if (added.count(section) == 0) unknown.insert(section);
  }
  if (!extra.empty()) {
    const size_t count = extra.size();
    extra.resize(std::min<size_t>(count, 10));
    throw Error(Code::kTensorMismatch,
                fmt::format("{} has {} that this run does not have", reader.path(),
                            counted(count, "tensor")),
                "resume with the program and the options that saved it, or save to another folder",
                extra);
  }
  if (!unknown.empty() && is_writer()) {
    print_error(fmt::format("lockstep: {} also has {}, which this run does not load\n",
                            reader.path(), fmt::join(unknown, ", ")));
  }
  if (reader.manifest().ranks != size_ && is_writer()) {
    print_error(fmt::format("lockstep: {} was saved by {}; random numbers start anew on {}\n",
                            reader.path(), counted(reader.manifest().ranks, "rank"), size_));
  }
}

}  // namespace lockstep
