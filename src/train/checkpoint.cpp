#include "lockstep/checkpoint.hpp"

#include <fmt/format.h>

#include <exception>
#include <utility>

#include "base/process.hpp"
#include "base/utf8.hpp"
#include "lockstep/error.hpp"
#include "train/checkpoint_state.hpp"

namespace lockstep {

Checkpoint::State::State(std::string folder, const std::optional<Communicator>& ranks,
                         const CheckpointOptions& options)
    : folder_(std::move(folder)), options_(options) {
  if (!is_utf8(folder_)) {
    throw Error(Code::kUsage, "the name of a folder for checkpoints is not UTF-8",
                "name it in UTF-8: manifests and messages hold such text only");
  }
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
  parts_.push_back({kRandomSection, random_part(streams_, rank_)});
}

Checkpoint::State::~State() {
  bool failed = std::uncaught_exceptions() > 0;
  try {
    // A question that is not waited for would abort the ranks that still ask it.
    if (stop_asked_ && !failed) stop_asked_->wait();
  } catch (...) {  // another rank has failed, and says so itself
    failed = true;
  }
  if (failed) abandon_save();
  try {
    wait_for_save();
  } catch (...) {  // likewise
  }
}

// Rank 0 alone holds the folder; the others are sent the result, and must be able to write to the
// same folder.
void Checkpoint::State::open_store() {
  std::string failure;
  std::string probe;
  std::exception_ptr error;
  auto& files = FileSystem::system();
  if (is_writer()) {
    try {
      store_.emplace(folder_);
      if (control_) probe = write_probe(files, folder_);
    } catch (const Error& caught) {
      error = std::current_exception();
      failure = caught.message();
    }
  }
  int blamed = 0;
  if (control_) {
    failure = control_->broadcast_text(failure, 0, files_call(control_));
    probe = control_->broadcast_text(probe, 0, checkpoint_call());
    std::string trouble;
    if (failure.empty()) trouble = trouble_at_probe(files, folder_, probe, rank_);
    const auto others = control_->all_gather_text(trouble, files_call(control_));
    if (is_writer() && !probe.empty()) files.remove(folder_ + probe);
    for (size_t rank = 0; rank < others.size() && failure.empty(); ++rank) {
      failure = others[rank];
      blamed = static_cast<int>(rank);
    }
  }
  if (error) std::rethrow_exception(error);
  opened_ = failure.empty();
  if (opened_) return;
  throw RankError(Code::kFileWrite, blamed, fmt::format("rank {}: {}", blamed, failure),
                  "give the full path of a folder that all ranks share and can write to");
}

void Checkpoint::State::add(const std::string& section, std::unique_ptr<CheckpointPart> part) {
  const bool plain = !section.empty() && section.find_first_not_of(
                                             "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                             "0123456789_-") == std::string::npos;
  if (!plain || section == kRandomSection || section == "manifest") {
    throw Error(Code::kUsage,
                fmt::format("\"{}\" cannot be the name of a part of a checkpoint", section),
                "use letters, digits, _ and -; \"random\" and \"manifest\" are taken");
  }
  parts_.push_back({section, std::move(part)});
  names_checked_ = false;
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

// A rank whose data has ended makes no step, and so does not save.
void Checkpoint::State::require_outside_join() const {
  if (!control_ || !detail::inside_join()) return;
  throw Error(Code::kUsage, "a checkpoint inside join(), where ranks may make fewer steps",
              "save after join(), on all ranks");
}

bool Checkpoint::State::step(int64_t step) {
  require_outside_join();
  const bool stop = is_asked_to_stop();
  const bool due = options_.every > 0 && step % options_.every == 0;
  if (due || stop) save(step);
  if (!stop) return true;
  PreemptionSignals::expect();
  wait_for_save();
  if (latest_step_ != step) {
    throw Error(Code::kCheckpoint,
                fmt::format("asked to stop, and the last step could not be saved to {}: {}",
                            folder_, last_failure_),
                "earlier checkpoints are intact; make room or repair the disk, and start again to "
                "resume from the latest");
  }
  if (is_writer()) print_error(fmt::format("lockstep: asked to stop: saved step {}\n", step));
  return false;
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

Checkpoint& Checkpoint::add(const std::string& name, ShardedModel& model) {
  state_->add(name, sharded_part(model));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, torch::optim::Optimizer& optimizer,
                            const ShardedModel& model) {
  state_->add(name, optimizer_part(name, optimizer, names_of(model)));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, const MasterWeights& masters,
                            const ShardedModel& model) {
  state_->add(name, masters_part(masters, model));
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

Checkpoint& Checkpoint::add(const std::string& name, LrScheduler& scheduler) {
  state_->add(name, scheduler_part(scheduler));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, WeightAverage& average) {
  state_->add(name, average_part(average));
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

Checkpoint& Checkpoint::add(const std::string& name, nlohmann::json& value) {
  state_->add(name, value_part(value));
  return *this;
}

Checkpoint& Checkpoint::add(const std::string& name, std::function<nlohmann::json()> save,
                            std::function<void(const nlohmann::json&)> load) {
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
