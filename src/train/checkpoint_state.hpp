#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "checkpoint/store.hpp"
#include "lockstep/checkpoint.hpp"
#include "lockstep/device_event.hpp"
#include "train/checkpoint_parts.hpp"
#include "train/preemption.hpp"

// What the ranks of a run do together: checkpoint_save.cpp, checkpoint_load.cpp, and
// checkpoint_agreement.cpp, which finds out whether their parts make one checkpoint.

namespace lockstep {

/// The section of random numbers.
inline constexpr const char* kRandomSection = "random";

/// How long a run that has failed waits for its last save.
inline constexpr std::chrono::seconds kAbandonAfter{5};

/// How ranks tell each other about a checkpoint, with the communicator's own deadline.
inline CallOptions checkpoint_call() {
  return {.label = "checkpoint"};
}

/// The same after each rank has read or written files, for which one may need much longer than
/// another. A rank that has died is noticed without a deadline.
inline CallOptions files_call(const std::optional<Communicator>& comm) {
  CallOptions options{.label = "checkpoint: files", .timeout = std::chrono::minutes(30)};
  if (comm) options.timeout = std::max(*options.timeout, comm->timeout());
  return options;
}

/// One line of an error, for a warning.
inline std::string first_line_of(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

/// The text of a JSON value whatever its strings hold: what is not UTF-8 is replaced.
inline std::string dump_anything(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// A section as it is being saved: this rank's share of its tensors, in the host's memory.
struct SectionSnapshot {
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

/// A tensor that this rank has, before ranks agree on who writes it.
struct ItemToSave {
  std::string section;
  PartContents::Item item;
  Dtype dtype = Dtype::kF32;
  int64_t number = 0;  ///< ranks with the same number have the same elements
};

/// Everything that a save needs once training has gone on.
struct SaveJob {
  int64_t step = 0;
  std::vector<SectionSnapshot> snapshots;
  nlohmann::json values = nlohmann::json::object();  // [section], of this rank
  std::vector<DeviceEvent> copied;
};

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
  void find_gpus();
  SaveJob snapshot(int64_t step);
  std::vector<ItemToSave> collect(SaveJob& job);
  torch::Tensor copy_of(const std::string& key, const torch::Tensor& tensor);
  void write(const SaveJob& job);
  void remove_older(int64_t step);
  nlohmann::json write_files(const SaveJob& job, const std::string& draft);
  Manifest assemble(const SaveJob& job, const std::vector<std::string>& reports) const;
  void wait_for_save();
  void abandon_save() noexcept;
  void require_on_all_ranks(const std::exception_ptr& error, const CallOptions& options) const;
  void note_failure(int64_t step, const std::string& reason);
  bool is_asked_to_stop();
  std::vector<std::vector<int64_t>> numbers_of_all_ranks(const std::vector<int64_t>& mine) const;
  void require_outside_join() const;
  void require_own_names_of_stages();
  void require_masters() const;
  void warn_of_other_values(const std::vector<ItemToSave>& mine);
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
  bool names_checked_ = false;   // since the last add()
  bool values_checked_ = false;  // once for each run
  struct Buffer {
    torch::Tensor memory;
    bool pinned = false;
  };
  std::unordered_map<std::string, Buffer> buffers_;  // copies, which the writer reads

  std::thread writer_;
  std::future<void> written_;  // the writer is done
  std::string outcome_;  // of the last save; empty: it went well. The thread's until it is joined
  std::exception_ptr lost_rank_;  // likewise: the job cannot go on, and whoever waits throws it
  int64_t writing_step_ = 0;
  std::optional<int64_t> latest_step_;  // that this object has saved, or resumed from
  int64_t saves_ = 0;
  int64_t failures_ = 0;
  std::string last_failure_;
  bool finished_ = false;

  std::optional<PreemptionSignals> signals_;
  torch::Tensor stop_flag_;
  std::optional<Work> stop_asked_;  // begun by the step before
};

}  // namespace lockstep
