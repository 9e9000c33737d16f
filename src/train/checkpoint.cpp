#include "lockstep/checkpoint.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <ctime>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/process.hpp"
#include "checkpoint/store.hpp"
#include "device/capture.hpp"
#include "device/dtype_map.hpp"
#include "lockstep/device_event.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "lockstep/version.hpp"
#include "train/checkpoint_parts.hpp"
#include "train/preemption.hpp"
#include "train/rank_texts.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr const char* kRandom = "random";

std::string now_text() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

// One line of an error, for a warning.
std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
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

// A section as it is being saved: this rank's share of its tensors, in the host's memory.
struct Snapshot {
  struct Tensor {
    std::string name;
    Dtype dtype = Dtype::kF32;
    Slice slice;
    torch::Tensor copy;
  };
  std::string section;
  std::string file;
  std::vector<Tensor> tensors;
};

// Everything that a save needs once training has gone on.
struct SaveJob {
  int64_t step = 0;
  std::vector<Snapshot> snapshots;
  json values = json::object();  // [section], of this rank
  std::vector<DeviceEvent> copied;
};

}  // namespace

class Checkpoint::State {
 public:
  State(std::string folder, const std::optional<Communicator>& ranks,
        const CheckpointOptions& options);
  ~State();

  void add(const std::string& section, std::unique_ptr<CheckpointPart> part);
  void add_stream(const Devices& devices) { streams_.devices.push_back(devices); }
  void add_stream(Pipeline& pipeline) { streams_.pipelines.push_back(&pipeline); }

  int64_t resume();
  bool step(int64_t step);
  void save(int64_t step);
  void finish();

 private:
  struct Part {
    std::string section;
    std::unique_ptr<CheckpointPart> part;
  };

  bool is_writer() const { return rank_ == 0; }
  void open_store();
  SaveJob snapshot(int64_t step);
  torch::Tensor copy_of(const std::string& key, const torch::Tensor& tensor);
  void write(const SaveJob& job);
  json write_files(const SaveJob& job, const std::string& draft);
  Manifest assemble(const SaveJob& job, const std::vector<std::string>& reports) const;
  void wait_for_save();
  void note_failure(int64_t step, const std::string& reason);
  bool is_asked_to_stop();
  std::string check(const std::string& path, std::optional<CheckpointReader>& reader) const;
  void load(const CheckpointReader& reader);
  void require_all_used(const CheckpointReader& reader,
                        const std::vector<SectionSource>& sources) const;

  const std::string folder_;
  const CheckpointOptions options_;
  int rank_ = 0;
  int size_ = 1;
  std::optional<Communicator> control_;   // calls of the training thread
  std::optional<Communicator> commit_;    // calls of whoever writes
  std::optional<CheckpointStore> store_;  // of rank 0, once opened
  bool opened_ = false;

  RandomStreams streams_;
  std::vector<Part> parts_;
  struct Buffer {
    torch::Tensor memory;
    bool pinned = false;
  };
  std::unordered_map<std::string, Buffer> buffers_;  // copies, which the writer reads

  std::thread writer_;
  std::string outcome_;  // of the last save; empty: it went well. The thread's until it is joined
  int64_t writing_step_ = 0;
  int64_t saves_ = 0;
  int64_t failures_ = 0;
  std::string last_failure_;
  bool finished_ = false;

  std::optional<PreemptionSignals> signals_;
  torch::Tensor stop_flag_;
  std::optional<Work> stop_asked_;  // begun by the step before
};

Checkpoint::State::State(std::string folder, const std::optional<Communicator>& ranks,
                         const CheckpointOptions& options)
    : folder_(std::move(folder)), options_(options) {
  if (options.every < 0 || options.keep < 1) {
    throw Error(Code::kUsage,
                fmt::format("a checkpoint was asked for every {} steps, to keep {}", options.every,
                            options.keep),
                "set every to 0 or more and keep to 1 or more");
  }
  if (ranks && ranks->size() > 1) {
    rank_ = ranks->rank();
    size_ = ranks->size();
    control_ = ranks->split(0, rank_, "checkpoint");
    commit_ = ranks->split(0, rank_, "checkpoint files");
    control_->hide();
    commit_->hide();
  }
  if (options.every > 0) {
    open_store();
    if (options.preemption) signals_.emplace();
  }
  parts_.push_back({kRandom, random_part(streams_, rank_)});
}

Checkpoint::State::~State() {
  try {
    wait_for_save();
    // A question that is not waited for would abort the ranks that still ask it.
    if (stop_asked_ && std::uncaught_exceptions() == 0) stop_asked_->wait();
  } catch (...) {  // another rank has failed, and says so itself
  }
}

// Rank 0 alone holds the folder; the others hear how it went, and must see the same folder.
void Checkpoint::State::open_store() {
  std::string failure;
  std::exception_ptr error;
  if (is_writer()) {
    try {
      store_.emplace(folder_);
    } catch (const Error& caught) {
      error = std::current_exception();
      failure = caught.message();
    }
  }
  int blamed = 0;
  if (control_) {
    failure = broadcast_text(*control_, failure);
    const bool unseen = failure.empty() && !is_held_for_writing(folder_);
    const auto others =
        all_gather_texts(*control_, unseen ? "it does not see rank 0's " + folder_ : "");
    for (size_t rank = 0; rank < others.size() && failure.empty(); ++rank) {
      failure = others[rank];
      blamed = static_cast<int>(rank);
    }
  }
  if (error) std::rethrow_exception(error);
  opened_ = failure.empty();
  if (opened_) return;
  throw RankError(Code::kFileWrite, blamed, fmt::format("rank {}: {}", blamed, failure),
                  "give the full path of a folder that rank 0 can write to and all ranks share");
}

void Checkpoint::State::add(const std::string& section, std::unique_ptr<CheckpointPart> part) {
  const bool plain = !section.empty() && section.find_first_not_of(
                                             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                             "0123456789_-") == std::string::npos;
  if (!plain || section == kRandom || section == "manifest") {
    throw Error(Code::kUsage,
                fmt::format("\"{}\" cannot be the name of a part of a checkpoint", section),
                "use letters, digits, _ and -; \"random\" and \"manifest\" are taken");
  }
  parts_.push_back({section, std::move(part)});
}

// Note [Who writes what] Ranks tell each other the numbers of the slices that they have. Each slice
// is written by the first rank that has it: rank 0 writes what all have, and every rank of a
// divided model its own part. If only rank 0 has anything of a section, its file is
// model.safetensors, which any reader of the format can load; otherwise model.rank0.safetensors and
// so on.
SaveJob Checkpoint::State::snapshot(int64_t step) {
  struct Mine {
    std::string section;
    PartContents::Item item;
    Dtype dtype;
    int64_t number;
  };
  SaveJob job;
  job.step = step;
  std::vector<Mine> mine;
  std::vector<int64_t> numbers;  // of section and slice, in turn
  streams_.gpus.clear();
  // The random numbers come last: the GPUs are known then.
  for (size_t i = 1; i <= parts_.size(); ++i) {
    auto& [section, part] = parts_[i % parts_.size()];
    PartContents contents = part->contents();
    if (!contents.value.is_null()) {
      const auto [found, is_new] = job.values.emplace(section, contents.value);
      if (!is_new && *found != contents.value) {
        throw Error(Code::kUsage, fmt::format("two parts named {} have different values", section),
                    "add them under different names");
      }
    }
    for (auto& item : contents.items) {
      const Dtype dtype = dtype_to_save(section, item);
      const int64_t number = number_of(section, item, dtype);
      if (item.tensor.is_cuda()) {
        auto& gpus = streams_.gpus;
        if (std::find(gpus.begin(), gpus.end(), item.tensor.device()) == gpus.end()) {
          gpus.push_back(item.tensor.device());
        }
      }
      numbers.push_back(static_cast<int64_t>(hash_of(section)));
      numbers.push_back(number);
      mine.push_back({section, std::move(item), dtype, number});
    }
  }
  const auto all = control_ ? all_gather_numbers(*control_, numbers)
                            : std::vector<std::vector<int64_t>>{numbers};
  std::unordered_map<int64_t, int> owner;       // [slice]
  std::unordered_map<int64_t, bool> is_shared;  // [section]: others than rank 0 write it too
  for (int rank = 0; rank < size_; ++rank) {
    const auto& theirs = all[static_cast<size_t>(rank)];
    for (size_t i = 0; i + 1 < theirs.size(); i += 2) {
      const bool is_new = owner.emplace(theirs[i + 1], rank).second;
      if (is_new && rank > 0) is_shared[theirs[i]] = true;
    }
  }
  std::map<std::string, Snapshot> sections;
  std::set<int64_t> taken;  // a tensor that two parts of a section name is written once
  for (auto& [section, item, dtype, number] : mine) {
    if (owner.at(number) != rank_ || !taken.insert(number).second) continue;
    auto& snapshot = sections[section];
    snapshot.section = section;
    const bool shared = is_shared.count(static_cast<int64_t>(hash_of(section))) > 0;
    snapshot.file = shared ? fmt::format("{}.rank{}.safetensors", section, rank_)
                           : fmt::format("{}.safetensors", section);
    snapshot.tensors.push_back(
        {item.name, dtype, item.slice, copy_of(section + "/" + item.name, item.tensor)});
  }
  for (const c10::Device gpu : streams_.gpus) job.copied.push_back(DeviceEvent::now(gpu));
  for (auto& [name, snapshot] : sections) job.snapshots.push_back(std::move(snapshot));
  return job;
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
  wait_for_save();
  if (!opened_) open_store();
  finished_ = false;
  ++saves_;
  writing_step_ = step;
  auto job = std::make_shared<const SaveJob>(snapshot(step));
  const auto work = [this, job] {
    try {
      for (const auto& event : job->copied) event.ns();
      write(*job);
      outcome_.clear();
    } catch (const std::exception& error) {
      outcome_ = describe(error);
    }
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
    } catch (const std::exception& error) {  // whatever it is, the other ranks must hear of it
      failure = describe(error);
    }
  };
  if (is_writer()) attempt([&] { draft = store_->begin(job.step); });
  if (commit_) {
    const auto told = json::parse(
        broadcast_text(*commit_, json({{"draft", draft}, {"failure", failure}}).dump()));
    draft = told["draft"].get<std::string>();
    failure = told["failure"].get<std::string>();
  }
  json report;
  attempt([&] { report = write_files(job, draft); });
  report["failure"] = failure;
  try {
    const std::vector<std::string> reports = commit_ ? all_gather_texts(*commit_, report.dump())
                                                     : std::vector<std::string>{report.dump()};
    for (size_t rank = 0; rank < reports.size() && failure.empty(); ++rank) {
      const auto told = json::parse(reports[rank]).at("failure").get<std::string>();
      if (!told.empty()) failure = fmt::format("rank {}: {}", rank, told);
    }
    if (is_writer()) {
      attempt([&] {
        store_->publish(draft, assemble(job, reports));
        draft.clear();
        store_->keep_latest(job.step, options_.keep);
      });
    }
    if (commit_) failure = broadcast_text(*commit_, failure);
  } catch (...) {  // another rank is gone: there is no checkpoint of all
    if (is_writer() && !draft.empty()) store_->discard(draft);
    throw;
  }
  if (is_writer() && !draft.empty()) store_->discard(draft);
  if (!failure.empty()) throw std::runtime_error(failure);
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
  if (outcome_.empty()) return;
  note_failure(writing_step_, std::exchange(outcome_, ""));
}

void Checkpoint::State::note_failure(int64_t step, const std::string& reason) {
  ++failures_;
  last_failure_ = fmt::format("step {}: {}", step, first_line(reason));
  if (!is_writer()) return;
  print_error(fmt::format(
      "lockstep: no checkpoint of step {}: {}; training goes on, earlier checkpoints are intact\n",
      step, first_line(reason)));
}

void Checkpoint::State::finish() {
  wait_for_save();
  if (stop_asked_) {
    stop_asked_->wait();
    stop_asked_.reset();
  }
  if (failures_ == 0 || std::exchange(finished_, true)) return;
  throw Error(Code::kFileWrite,
              fmt::format("{} of {} checkpoints could not be saved to {}; the last was {}",
                          failures_, saves_, folder_, last_failure_),
              "earlier checkpoints are intact; make room or repair the disk, and start again to "
              "resume from the latest");
}

// Each step asks whether a signal has come to any rank, and learns the answer to the question of
// the step before. So no rank waits for another, and all stop after the same step.
bool Checkpoint::State::is_asked_to_stop() {
  if (!signals_) return false;
  const bool here = PreemptionSignals::received() != 0;
  if (!control_) return here;
  bool anywhere = false;
  if (stop_asked_) {
    stop_asked_->wait();
    anywhere = stop_flag_.item<float>() > 0;
  }
  stop_asked_.reset();
  if (anywhere) return true;
  stop_flag_ = torch::full({1}, here ? 1.0F : 0.0F, torch::kFloat32);
  stop_asked_.emplace(
      control_->begin_all_reduce(stop_flag_, ReduceOp::kMax, {.label = "checkpoint: stop?"}));
  return false;
}

bool Checkpoint::State::step(int64_t step) {
  const bool stop = is_asked_to_stop();
  const bool due = options_.every > 0 && step % options_.every == 0;
  if (due || stop) save(step);
  if (!stop) return true;
  wait_for_save();
  if (is_writer()) {
    print_error(fmt::format("lockstep: asked to stop: {} step {}\n",
                            failures_ == 0 ? "saved" : "could not save", step));
  }
  return false;
}

// What makes a checkpoint useless to this rank; empty: nothing. Each rank reads every n-th file.
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
    return error.message();
  } catch (const std::exception& error) {
    return describe(error);
  }
}

int64_t Checkpoint::State::resume() {
  wait_for_save();
  json paths = json::array();
  if (is_writer()) {
    auto entries = list_checkpoints(folder_);
    for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
      paths.push_back(entry->path);
    }
  }
  if (control_) paths = json::parse(broadcast_text(*control_, paths.dump()));
  std::vector<std::string> refused;
  for (const auto& candidate : paths) {
    const auto path = candidate.get<std::string>();
    std::optional<CheckpointReader> reader;
    std::string reason = check(path, reader);
    if (control_) {
      for (const auto& text : all_gather_texts(*control_, reason)) {
        if (reason.empty()) reason = text;
      }
    }
    if (reason.empty()) {
      load(*reader);
      return reader->manifest().step;
    }
    refused.push_back(reason);
    if (is_writer()) {
      print_error(fmt::format("lockstep: {} is damaged and passed over: {}\n", path, reason));
    }
  }
  if (refused.empty()) return 0;
  throw Error(Code::kFileFormat, fmt::format("no checkpoint of {} is good", folder_),
              "remove or repair the folder; without any checkpoint the run starts anew", refused);
}

void Checkpoint::State::load(const CheckpointReader& reader) {
  std::vector<SectionSource> sources;
  std::vector<std::function<void()>> apply;
  std::string failure;
  std::exception_ptr error;
  try {
    for (size_t i = 1; i <= parts_.size(); ++i) {  // random numbers last
      auto& [section, part] = parts_[i % parts_.size()];
      auto& source = sources.emplace_back(reader, section, rank_, size_);
      apply.push_back(part->load(source));
    }
  } catch (const std::exception& caught) {
    error = std::current_exception();
    failure = first_line(describe(caught));
    sources.clear();
  }
  if (control_) {  // all load it, or none
    const auto failures = all_gather_texts(*control_, failure);
    for (size_t rank = 0; rank < failures.size() && !error; ++rank) {
      if (failures[rank].empty()) continue;
      throw RankError(Code::kTensorMismatch, static_cast<int>(rank),
                      fmt::format("rank {}: {}", rank, failures[rank]),
                      "resume with the program and the options that saved it");
    }
  }
  if (error) std::rethrow_exception(error);
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
  const auto all =
      control_ ? all_gather_numbers(*control_, mine) : std::vector<std::vector<int64_t>>{mine};
  for (const auto& numbers : all) used.insert(numbers.begin(), numbers.end());
  std::vector<std::string> extra;
  std::set<std::string> unknown;
  for (const auto& tensor : reader.manifest().tensors) {
    if (added.count(tensor.section) == 0) {
      unknown.insert(tensor.section);
    } else if (tensor.section != kRandom && used.count(number(tensor.section, tensor.name)) == 0) {
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
                fmt::format("{} has {} tensor{} that this run does not have", reader.path(), count,
                            count == 1 ? "" : "s"),
                "resume with the program and the options that saved it, or save to another folder",
                extra);
  }
  if (!unknown.empty() && is_writer()) {
    print_error(fmt::format("lockstep: {} also has {}, which this run does not load\n",
                            reader.path(), fmt::join(unknown, ", ")));
  }
  if (reader.manifest().ranks != size_ && is_writer()) {
    print_error(fmt::format(
        "lockstep: {} was saved by {} rank{}; random numbers start anew on {}\n", reader.path(),
        reader.manifest().ranks, reader.manifest().ranks == 1 ? "" : "s", size_));
  }
}

Checkpoint::Checkpoint(std::string folder, const CheckpointOptions& options)
    : state_(std::make_unique<State>(std::move(folder), std::nullopt, options)) {}

Checkpoint::Checkpoint(std::string folder, const Communicator& ranks,
                       const CheckpointOptions& options)
    : state_(std::make_unique<State>(std::move(folder), ranks, options)) {}

Checkpoint::~Checkpoint() = default;

Checkpoint& Checkpoint::add(const std::string& name, torch::nn::Module& module) {
  state_->add(name, module_part(module));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, Pipeline& pipeline) {
  state_->add(name, pipeline_part(pipeline));
  state_->add_stream(pipeline);
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, torch::optim::Optimizer& optimizer,
                            const torch::nn::Module& module) {
  state_->add(name, optimizer_part(name, optimizer, names_of(module)));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, torch::optim::Optimizer& optimizer,
                            const Pipeline& pipeline) {
  state_->add(name, optimizer_part(name, optimizer, names_of(pipeline)));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, GradScaler& scaler) {
  state_->add(name, scaler_part(scaler));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, const MasterWeights& masters,
                            const torch::nn::Module& module) {
  state_->add(name, masters_part(masters, module));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, torch::optim::LRScheduler& scheduler) {
  state_->add(name, scheduler_part(scheduler));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, DistributedSampler& sampler) {
  state_->add(name, sampler_part(sampler));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, torch::Tensor& tensor) {
  state_->add(name, tensor_part(name, tensor));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, int64_t& value) {
  state_->add(name, value_part(value));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, double& value) {
  state_->add(name, value_part(value));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, std::string& value) {
  state_->add(name, value_part(value));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, json& value) {
  state_->add(name, value_part(value));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, std::function<json()> save,
                            std::function<void(const json&)> load) {
  state_->add(name, value_part(std::move(save), std::move(load)));
  return *this;
}

Checkpoint& Checkpoint::add(const Devices& devices) {
  state_->add_stream(devices);
  return *this;
}

int64_t Checkpoint::resume() {
  return state_->resume();
}

bool Checkpoint::step(int64_t step) {
  return state_->step(step);
}

void Checkpoint::save(int64_t step) {
  state_->save(step);
}

void Checkpoint::finish() {
  state_->finish();
}

}  // namespace lockstep
