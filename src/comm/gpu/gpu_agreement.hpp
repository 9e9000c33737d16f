#pragma once

#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/backend.hpp"

namespace lockstep {

/// A part of a call that others must take part in.
class Awaited {
 public:
  virtual ~Awaited() = default;
  /// Does what can be done without waiting; true when over.
  virtual bool advance() = 0;
  virtual void wait() = 0;
};

/// A small block of bytes from every rank, over a communicator of the host. Blocks of one exchange
/// have one size; ranks begin the exchanges of a communicator in one order. Destroyed before it is
/// done, it aborts that communicator.
class GpuExchange final : public Awaited {
 public:
  /// `why` is the GPU call that this is a part of: errors speak of it, not of the host's call.
  GpuExchange(Backend& channel, const Call& why, std::span<const std::byte> own,
              int64_t deadline_ns);
  GpuExchange(const GpuExchange&) = delete;
  GpuExchange& operator=(const GpuExchange&) = delete;

  bool advance() override;
  void wait() override;

  /// When over.
  std::span<const std::byte> block(int place) const;

 private:
  Backend& channel_;
  Call why_;
  size_t block_bytes_;
  std::vector<std::byte> blocks_;     // [place], of block_bytes_; zeros where a rank has not filled
  std::unique_ptr<Pending> pending_;  // null in a group of one
};

/// All ranks' calls, compared. `note` may carry what else ranks must know of each other.
class GpuAgreement final : public Awaited {
 public:
  GpuAgreement(Backend& channel, const Call& own, std::span<const std::byte> note,
               int64_t deadline_ns);

  /// kCallMismatch where a rank made another call.
  bool advance() override;
  void wait() override;

  std::span<const Call> calls() const { return calls_; }  ///< [place], when done
  template <class Note>
  Note note(int place) const {
    Note value;
    std::memcpy(&value, exchange_.block(place).data() + sizeof(Call), sizeof value);
    return value;
  }

 private:
  void compare();

  const Group& group_;
  Call own_;
  GpuExchange exchange_;
  std::vector<Call> calls_;
};

/// What a rank did whose absence made another one give up.
enum class Accused {
  kMayBeLate,  ///< it may have come to its call only afterwards
  kWaitedToo   ///< it waited in a call itself, which therefore is another one
};

/// Rethrows the exception being handled, an error of a host communicator, as one of the GPU call
/// `why`.
[[noreturn]] void rethrow_as_part_of(const Group& group, const Call& why,
                                     Accused accused = Accused::kMayBeLate);

/// What a rank says of its own error when it gives up, so that its peers throw the same:
/// rethrow_as_part_of() understands it.
std::string farewell_of(const std::exception_ptr& error);

/// [place] -> what that rank's values are multiplied by in a mean; none in other operations. kUsage
/// where all weigh nothing.
std::vector<double> mean_factors(std::span<const Call> calls);

}  // namespace lockstep
