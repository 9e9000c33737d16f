#pragma once

#include <torch/types.h>

#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/streams.hpp"
#include "lockstep/communicator.hpp"
#include "lockstep/pipeline.hpp"

namespace lockstep {

enum class Payload { kActivation, kGradient };

/// Identifies a message between stages.
struct MessageTag {
  Payload payload = Payload::kActivation;
  int from_stage = 0;
  int micro_batch = 0;

  auto operator<=>(const MessageTag&) const = default;
};

/// What decides the shapes of a micro-batch's messages: how many rows it has, and what a row of the
/// step's input is.
struct MicroBatchShape {
  int64_t rows = 0;
  std::vector<int64_t> row;  ///< sizes of the input's other dimensions
  torch::ScalarType dtype = torch::kFloat;

  auto operator<=>(const MicroBatchShape&) const = default;
};

/// Between ranks a tensor may have at most so many dimensions.
inline constexpr size_t kMaxDimensions = 10;

/// How one pipeline rank exchanges tensors with the stages around its own.
class StageChannel {
 public:
  virtual ~StageChannel() = default;

  /// Does not wait for the receiver.
  virtual void send(const MessageTag& tag, const torch::Tensor& tensor,
                    const MicroBatchShape& shape) = 0;

  /// Returns the tensor on this rank's device, ready for its current stream.
  virtual torch::Tensor receive(const MessageTag& tag, const MicroBatchShape& shape) = 0;

  /// Releases every rank that waits for this one.
  virtual void abort(const std::string& reason) = 0;

  /// What has gone to other pipeline ranks so far.
  virtual LinkStats stats() const = 0;
};

/// Another stage of this process has failed; its own error is the one to report.
class Stopped : public std::exception {
 public:
  const char* what() const noexcept override { return "another stage failed"; }
};

/// Where the stages of one process leave tensors for each other. Thread-safe.
class Mailbox {
 public:
  struct Message {
    torch::Tensor tensor;
    StreamOrder order;  ///< when the tensor is ready on its device
    Device* from = nullptr;
  };

  void put(const MessageTag& tag, Message message);

  /// Waits for the message. Throws Stopped once a stage has failed.
  Message take(const MessageTag& tag);

  /// Ends all waits. Keeps the first error.
  void fail(std::exception_ptr error);

  std::exception_ptr error() const;

  /// Empties the mailbox for the next step.
  void clear();

 private:
  mutable std::mutex mutex_;  // guards all below
  std::condition_variable arrived_;
  std::map<MessageTag, Message> messages_;
  std::exception_ptr error_;
};

/// Between the devices of one process. Each device gets a copy of its own, as if it could not reach
/// the others' memory; stages on one device hand tensors over as they are.
std::unique_ptr<StageChannel> make_local_channel(Mailbox& mailbox, Device& device);

/// Between the ranks of an axis. Collective over `axis`: makes a link for each pair of neighboring
/// stages and each direction. Refuses a schedule whose ranks would receive messages in another
/// order than they are sent.
std::unique_ptr<StageChannel> make_rank_channel(const Communicator& axis, const Schedule& schedule,
                                                Device& device);

}  // namespace lockstep
