#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <exception>
#include <map>
#include <stdexcept>
#include <utility>

#include "base/checksum.hpp"
#include "base/counted.hpp"
#include "base/process.hpp"
#include "device/capture.hpp"
#include "device/dtype_map.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "lockstep/version.hpp"
#include "train/checkpoint_state.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

std::string now_text() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

// Identifies a slice of a tensor: ranks with the same number have the same elements.
int64_t number_of(const std::string& section, const PartContents::Item& item, Dtype dtype) {
  json facts = {section, item.name, dtype_name(dtype), item.slice.whole};
  for (const auto& block : item.slice.blocks) {
    facts.push_back({block.local, block.whole, block.shape});
  }
  return static_cast<int64_t>(hash_of(facts.dump()));
}

Dtype dtype_to_save(const std::string& section, const PartContents::Item& item) {
  if (const auto dtype = dtype_of(item.tensor.scalar_type())) return *dtype;
  throw Error(Code::kTensorMismatch,
              fmt::format("tensor {} of {} is {}, which safetensors cannot hold", item.name,
                          section, dtype_text(item.tensor.scalar_type())),
              "convert it first, e.g. with .to(torch::kFloat32)");
}

// As the manifest holds it: its text is UTF-8.
json stored_value(const std::string& section, const json& value) {
  json stored = encode_numbers(value);
  try {
    (void)stored.dump();
  } catch (const json::exception&) {
    throw Error(Code::kUsage, fmt::format("{} has text that is not UTF-8", section),
                "save bytes as a tensor, or as a JSON array of numbers");
  }
  return stored;
}

void add_gpu_of(const torch::Tensor& tensor, std::vector<c10::Device>& gpus) {
  const bool known = std::find(gpus.begin(), gpus.end(), tensor.device()) != gpus.end();
  if (tensor.is_cuda() && !known) gpus.push_back(tensor.device());
}

}  // namespace

// The GPUs of this rank, in the order of the first tensor on each. A run that resumes has the same
// ones, although its optimizer has no state yet.
void Checkpoint::State::find_gpus() {
  streams_.gpus.clear();
  for (const auto& [section, part] : parts_) {
    for (const auto& item : part->items()) add_gpu_of(item.tensor, streams_.gpus);
  }
}

// Note [Who writes what] Ranks tell each other the numbers of the slices that they have. Each slice
// is written by the first rank that has it: rank 0 writes what all have, and every rank of a
// divided model its own part. If only rank 0 has anything of a section, its file is
// model.safetensors, which any reader of the format can load; otherwise model.rank0.safetensors and
// so on.
SaveJob Checkpoint::State::snapshot(int64_t step) {
  SaveJob job;
  job.step = step;
  std::vector<ItemToSave> mine;
  std::exception_ptr error;
  try {
    mine = collect(job);
  } catch (const std::exception&) {
    error = std::current_exception();
  }
  require_on_all_ranks(error, checkpoint_call());
  std::vector<int64_t> numbers;  // of section and slice, in turn
  for (const auto& each : mine) {
    numbers.push_back(static_cast<int64_t>(hash_of(each.section)));
    numbers.push_back(each.number);
  }
  warn_of_other_values(mine);
  const auto all = numbers_of_all_ranks(numbers);
  std::unordered_map<int64_t, int> owner;       // [slice]
  std::unordered_map<int64_t, bool> is_shared;  // [section]: others than rank 0 write it too
  for (int rank = 0; rank < size_; ++rank) {
    const auto& theirs = all[static_cast<size_t>(rank)];
    for (size_t i = 0; i + 1 < theirs.size(); i += 2) {
      const bool is_new = owner.emplace(theirs[i + 1], rank).second;
      if (is_new && rank > 0) is_shared[theirs[i]] = true;
    }
  }
  std::map<std::string, SectionSnapshot> sections;
  std::vector<c10::Device> gpus;  // that are copied from
  std::map<int64_t, const void*>
      taken;  // a tensor that two parts of a section name is written once
  for (auto& [section, item, dtype, number] : mine) {
    const auto [found, is_new] = taken.emplace(number, item.tensor.data_ptr());
    if (!is_new && item.trained && found->second != item.tensor.data_ptr()) {
      throw Error(Code::kUsage,
                  fmt::format("two modules added as \"{}\" both have {}", section, item.name),
                  "add them under different names, or give their layers different ones");
    }
    if (owner.at(number) != rank_ || !is_new) continue;
    auto& snapshot = sections[section];
    snapshot.section = section;
    const bool shared = is_shared.count(static_cast<int64_t>(hash_of(section))) > 0;
    snapshot.file = shared ? fmt::format("{}.rank{}.safetensors", section, rank_)
                           : fmt::format("{}.safetensors", section);
    add_gpu_of(item.tensor, gpus);
    snapshot.tensors.push_back(
        {item.name, dtype, item.slice, copy_of(section + "/" + item.name, item.tensor)});
  }
  for (const c10::Device gpu : gpus) job.copied.push_back(DeviceEvent::now(gpu));
  for (auto& [name, snapshot] : sections) job.snapshots.push_back(std::move(snapshot));
  return job;
}

// The tensors and values of all parts of this rank.
std::vector<ItemToSave> Checkpoint::State::collect(SaveJob& job) {
  std::vector<ItemToSave> mine;
  find_gpus();
  for (size_t i = 1; i <= parts_.size(); ++i) {  // random numbers last: the program may draw some
    auto& [section, part] = parts_[i % parts_.size()];
    PartContents contents = part->contents();
    if (!contents.value.is_null()) {
      const json value = stored_value(section, contents.value);
      const auto [found, is_new] = job.values.emplace(section, value);
      if (!is_new && *found != value) {
        throw Error(Code::kUsage, fmt::format("two parts named {} have different values", section),
                    "add them under different names");
      }
    }
    for (auto& item : contents.items) {
      const Dtype dtype = dtype_to_save(section, item);
      const int64_t number = number_of(section, item, dtype);
      mine.push_back({section, std::move(item), dtype, number});
    }
  }
  return mine;
}

// On a GPU the copy is queued behind the step's work, and nothing waits for it here. Memory of the
// save before is used again: no page of it is new.
torch::Tensor Checkpoint::State::copy_of(const std::string& key, const torch::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  auto& [memory, pinned] = buffers_[key];
  if (!memory.defined() || memory.sizes() != tensor.sizes() ||
      memory.scalar_type() != tensor.scalar_type() || pinned != tensor.is_cuda()) {
    pinned = tensor.is_cuda();
    memory = torch::empty(tensor.sizes(),
                          torch::TensorOptions(tensor.scalar_type()).pinned_memory(pinned));
  }
  memory.copy_(tensor.detach(), /*non_blocking=*/true);
  return memory;
}

void Checkpoint::State::save(int64_t step) {
  require_not_capturing("saving a checkpoint", "save it between two steps");
  require_outside_join();
  wait_for_save();
  if (latest_step_ == step) return;
  require_own_names_of_stages();
  if (!opened_) open_store();
  finished_ = false;
  ++saves_;
  writing_step_ = step;
  auto job = std::make_shared<const SaveJob>(snapshot(step));
  outcome_ = "its thread did not start";  // until it has
  auto written = std::make_shared<std::promise<void>>();
  written_ = written->get_future();
  const auto work = [this, job, written] {
    try {
      for (const auto& event : job->copied) event.ns();
      write(*job);
      outcome_.clear();
    } catch (const RankError&) {
      lost_rank_ = std::current_exception();
    } catch (const std::exception& error) {
      outcome_ = describe(error);
    }
    written->set_value();
  };
  if (options_.asynchronous) {
    writer_ = start_quiet_thread(work);
  } else {
    work();
    wait_for_save();
  }
}

void Checkpoint::State::write(const SaveJob& job) {
  std::string draft;
  std::string failure;
  const auto attempt = [&](const auto& body) {
    if (!failure.empty()) return;
    try {
      body();
    } catch (const Error& error) {
      failure = error.message();
    } catch (const std::exception& error) {  // whatever it is, the other ranks must learn of it
      failure = describe(error);
    }
  };
  if (is_writer()) attempt([&] { draft = store_->begin(job.step); });
  if (commit_) {
    const auto draft_message = json::parse(commit_->broadcast_text(
        dump_anything({{"draft", draft}, {"failure", failure}}), 0, checkpoint_call()));
    draft = draft_message["draft"].get<std::string>();
    failure = draft_message["failure"].get<std::string>();
  }
  json report;
  attempt([&] { report = write_files(job, draft); });
  report["failure"] = failure;
  try {
    const std::vector<std::string> reports =
        commit_ ? commit_->gather_text(dump_anything(report), 0, files_call(commit_))
                : std::vector<std::string>{dump_anything(report)};
    for (size_t rank = 0; rank < reports.size() && failure.empty(); ++rank) {
      const auto reported = json::parse(reports[rank]).at("failure").get<std::string>();
      if (!reported.empty()) failure = fmt::format("rank {}: {}", rank, reported);
    }
    if (is_writer()) {
      attempt([&] {
        store_->publish(draft, assemble(job, reports));
        draft.clear();
      });
      if (failure.empty()) remove_older(job.step);
    }
    if (commit_) failure = commit_->broadcast_text(failure, 0, files_call(commit_));
  } catch (...) {  // another rank is gone: there is no checkpoint of all
    if (is_writer() && !draft.empty()) store_->discard(draft);
    throw;
  }
  if (is_writer() && !draft.empty()) store_->discard(draft);
  if (!failure.empty()) throw std::runtime_error(failure);
}

// The new checkpoint is on disk, whatever becomes of the older ones.
void Checkpoint::State::remove_older(int64_t step) {
  try {
    store_->keep_latest(step, options_.keep);
  } catch (const Error& error) {
    print_error(
        fmt::format("lockstep: step {} is saved; older checkpoints could not be removed: "
                    "{}\n",
                    step, error.message()));
  }
}

json Checkpoint::State::write_files(const SaveJob& job, const std::string& draft) {
  json report = {{"files", json::array()}, {"tensors", json::array()}, {"values", job.values}};
  auto& files = FileSystem::system();
  for (const auto& snapshot : job.snapshots) {
    SectionFile section{snapshot.section, snapshot.file, {}, {}};
    for (const auto& tensor : snapshot.tensors) {
      section.tensors.push_back({tensor.name,
                                 tensor.dtype,
                                 tensor.slice.local,
                                 {static_cast<const std::byte*>(tensor.copy.data_ptr()),
                                  static_cast<size_t>(tensor.copy.nbytes())}});
      section.slices.push_back(tensor.slice);
    }
    const auto written = write_section(files, draft, section);
    report["files"].push_back(to_json(written.file));
    for (const auto& tensor : written.tensors) report["tensors"].push_back(to_json(tensor));
  }
  if (!job.snapshots.empty() && !is_writer()) sync_folder(files, draft);
  return report;
}

Manifest Checkpoint::State::assemble(const SaveJob& job,
                                     const std::vector<std::string>& reports) const {
  Manifest manifest;
  manifest.step = job.step;
  manifest.ranks = size_;
  manifest.created = now_text();
  manifest.lockstep = kVersion;
  std::map<std::string, std::vector<json>> values;  // [section][rank]
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const auto report = json::parse(reports[rank]);
    for (const auto& file : report["files"]) manifest.files.push_back(file_from(file));
    for (const auto& tensor : report["tensors"]) manifest.tensors.push_back(tensor_from(tensor));
    for (const auto& [section, value] : report["values"].items()) {
      auto& all = values[section];
      all.resize(reports.size());
      all[rank] = value;
    }
  }
  for (const auto& [section, all] : values) {
    const bool alike = std::all_of(all.begin(), all.end(),
                                   [&](const json& value) { return value == all.front(); });
    manifest.values[section] = alike ? json{{"all", all.front()}} : json{{"ranks", all}};
  }
  manifest.tensors = merge_pieces(std::move(manifest.tensors));
  return manifest;
}

void Checkpoint::State::wait_for_save() {
  if (writer_.joinable()) writer_.join();
  if (!written_.valid()) return;
  written_ = {};
  if (lost_rank_) std::rethrow_exception(std::exchange(lost_rank_, nullptr));
  if (outcome_.empty()) {
    latest_step_ = writing_step_;
  } else {
    note_failure(writing_step_, std::exchange(outcome_, ""));
  }
}

// The run has failed. A save that goes on by itself may still end well; one that waits for a rank
// which no longer answers must not keep this process from ending.
void Checkpoint::State::abandon_save() noexcept {
  if (!commit_ || !written_.valid()) return;
  const auto patience = std::min<std::chrono::milliseconds>(commit_->timeout(), kAbandonAfter);
  if (written_.wait_for(patience) == std::future_status::ready) return;
  commit_->abort("gave up a save, since the run has failed");
}

void Checkpoint::State::note_failure(int64_t step, const std::string& reason) {
  ++failures_;
  last_failure_ = fmt::format("step {}: {}", step, first_line_of(reason));
  if (!is_writer()) return;
  print_error(
      fmt::format("lockstep: no checkpoint of step {}: {}; earlier checkpoints are intact\n", step,
                  first_line_of(reason)));
}

void Checkpoint::State::finish() {
  wait_for_save();
  if (stop_asked_) {
    stop_asked_->wait();
    stop_asked_.reset();
  }
  if (failures_ == 0 || std::exchange(finished_, true)) return;
  throw Error(Code::kCheckpoint,
              fmt::format("{} of {} could not be saved to {}; the last was {}", failures_,
                          counted(saves_, "checkpoint"), folder_, last_failure_),
              "earlier checkpoints are intact; make room or repair the disk, and start again to "
              "resume from the latest");
}

}  // namespace lockstep
