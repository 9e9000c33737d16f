#pragma once

#include <torch/types.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/communicator.hpp"
#include "pipeline/exchange.hpp"

namespace lockstep {

/// One end of a one-way line between two ranks of a pipeline: what one stage sends another. The
/// shape of what comes is agreed on with the first message of each number of rows, inside and
/// outside Autocast apart; later messages are bare data.
///
/// Note [A thread for each line]
/// A send may have to wait for its receiver, who may himself be about to send the other way, and
/// would wait for us: so sends happen on a thread of the line's own, in order, and a stage goes on
/// computing.
class RankChannel {
 public:
  /// `pair` joins the two ranks and is used by this line only.
  RankChannel(const Communicator& pair, bool sends, Device& device);
  ~RankChannel();
  RankChannel(const RankChannel&) = delete;
  RankChannel& operator=(const RankChannel&) = delete;

  /// Throws what an earlier send came to.
  void send(const ParcelName& name, const torch::Tensor& tensor, int64_t rows);

  torch::Tensor receive(const ParcelName& name, int64_t rows);

  void abort(const std::string& reason) const { pair_.abort(reason); }
  int64_t bytes() const { return bytes_; }
  int64_t messages() const { return messages_; }

 private:
  struct Shape {
    torch::ScalarType dtype = torch::kFloat;
    std::vector<int64_t> sizes;
    bool operator==(const Shape&) const = default;
  };
  using Circumstances = std::pair<int64_t, int>;  // rows, and what autocast makes of them
  struct Letter {
    Parcel parcel;
    std::string label;
    int tag = 0;
    bool announce = false;  // the shape goes first
  };

  int peer() const { return 1 - pair_.rank(); }
  Circumstances circumstances(int64_t rows) const;
  void deliver_letters();
  void send_shape(const Shape& shape, const std::string& label) const;
  Shape receive_shape(const std::string& label) const;

  const Communicator pair_;
  Device& device_;
  std::map<Circumstances, Shape> agreed_;
  int64_t bytes_ = 0;
  int64_t messages_ = 0;

  std::mutex mutex_;  // guards the next four
  std::condition_variable changed_;
  std::deque<Letter> letters_;
  std::exception_ptr error_;  // of a send
  bool closing_ = false;

  std::thread postman_;  // of the end that sends; last: uses all of the above
};

}  // namespace lockstep
