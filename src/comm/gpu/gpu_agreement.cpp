#include "comm/gpu/gpu_agreement.hpp"

#include <fmt/format.h>

#include <cstdio>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

std::vector<std::byte> call_and_note(const Call& call, std::span<const std::byte> note) {
  std::vector<std::byte> block(sizeof call + note.size());
  std::memcpy(block.data(), &call, sizeof call);
  if (!note.empty()) std::memcpy(block.data() + sizeof call, note.data(), note.size());
  return block;
}

// What farewell_of() writes: "[LS0020, rank 2] ranks made …", without the rank where nobody is
// blamed.
struct Farewell {
  Code code = Code::kInternal;
  int blamed = -1;
  std::string text;
};

bool read_farewell(const std::string& message, Farewell& farewell) {
  constexpr std::string_view kBefore = "gave up: [";
  const size_t found = message.find(kBefore);
  if (found == std::string::npos) return false;
  const size_t begin = found + kBefore.size();
  const size_t end = message.find("] ", begin);
  int code = 0;
  if (end == std::string::npos || std::sscanf(message.c_str() + begin, "LS%d", &code) != 1) {
    return false;
  }
  farewell.code = static_cast<Code>(code);
  std::sscanf(message.c_str() + begin, "LS%*d, rank %d", &farewell.blamed);
  farewell.text = message.substr(end + 2);
  return true;
}

// "all_reduce #9: 288 x U8, sum: rank 2 of 4 absent …" becomes "barrier #3: rank 2 of 4 absent …".
std::string retold(const Group& group, const Call& why, const std::string& text) {
  const size_t rank = text.find(": rank");
  const std::string rest = rank == std::string::npos ? ": " + text : text.substr(rank);
  return describe_in(group, why) + rest;
}

int own_rank(const Group& group) {
  return group.world_ranks.at(static_cast<size_t>(group.rank));
}

// Rank `by` missed this one and gave up, with this text. A rank does not blame itself: it was in
// another call, of which `by` does not know, or comes only now.
[[noreturn]] void throw_accused(const Group& group, const Call& why, int by,
                                const std::string& text, Accused accused) {
  if (accused == Accused::kWaitedToo) {
    throw RankError(
        Code::kCallMismatch, -1,
        fmt::format("ranks made different calls and wait for each other: rank {} called "
                    "{}; rank {} gave up in {}",
                    own_rank(group), describe_in(group, why), by, text),
        "make the same calls in the same order on every rank");
  }
  throw RankError(Code::kRankFailed, by,
                  fmt::format("{}: rank {} missed this rank and gave up: {}",
                              describe_in(group, why), by, text),
                  "make the same calls in the same order and in time on every rank");
}

}  // namespace

GpuExchange::GpuExchange(Backend& channel, const Call& why, std::span<const std::byte> own,
                         int64_t deadline_ns)
    : channel_(channel),
      why_(why),
      block_bytes_(own.size()),
      blocks_(block_bytes_ * static_cast<size_t>(channel.size())) {
  if (!own.empty()) {
    std::memcpy(blocks_.data() + block_bytes_ * static_cast<size_t>(channel.rank()), own.data(),
                block_bytes_);
  }
  if (channel.size() == 1) return;
  try {
    // All other ranks have zeros where this one has its block: the sum is every rank's.
    const Buffer buffer{blocks_.data(), static_cast<int64_t>(blocks_.size()), Dtype::kU8};
    pending_ =
        channel.all_reduce(buffer, ReduceOp::kSum, 1, {.deadline_ns = deadline_ns, .label = ""});
  } catch (const Error&) {
    rethrow_as_part_of(channel.group(), why_);
  }
}

bool GpuExchange::advance() {
  try {
    return !pending_ || pending_->advance();
  } catch (const Error&) {
    rethrow_as_part_of(channel_.group(), why_, Accused::kWaitedToo);
  }
}

void GpuExchange::wait() {
  try {
    if (pending_) pending_->wait();
  } catch (const Error&) {
    rethrow_as_part_of(channel_.group(), why_, Accused::kWaitedToo);
  }
}

std::span<const std::byte> GpuExchange::block(int place) const {
  return std::span(blocks_).subspan(block_bytes_ * static_cast<size_t>(place), block_bytes_);
}

GpuAgreement::GpuAgreement(Backend& channel, const Call& own, std::span<const std::byte> note,
                           int64_t deadline_ns)
    : group_(channel.group()),
      own_(own),
      exchange_(channel, own, call_and_note(own, note), deadline_ns) {}

bool GpuAgreement::advance() {
  if (!calls_.empty()) return true;
  if (!exchange_.advance()) return false;
  compare();
  return true;
}

void GpuAgreement::wait() {
  if (!calls_.empty()) return;
  exchange_.wait();
  compare();
}

void GpuAgreement::compare() {
  std::vector<Call> calls(static_cast<size_t>(group_.size()));
  bool same = true;
  for (size_t place = 0; place < calls.size(); ++place) {
    std::memcpy(&calls[place], exchange_.block(static_cast<int>(place)).data(), sizeof(Call));
    same = same && agree(own_, calls[place]);
  }
  if (!same) throw_mismatch(group_, calls);
  calls_ = std::move(calls);
}

void rethrow_as_part_of(const Group& group, const Call& why, Accused accused) {
  try {
    throw;
  } catch (const RankError& error) {
    Farewell farewell;
    if (!read_farewell(error.message(), farewell)) {
      throw RankError(error.code(), error.blamed_rank(), retold(group, why, error.message()),
                      error.help(), error.notes());
    }
    if (farewell.code == Code::kRankAbsent && farewell.blamed == own_rank(group)) {
      throw_accused(group, why, error.blamed_rank(), farewell.text, accused);
    }
    const bool mismatch = farewell.code == Code::kCallMismatch;
    throw RankError(farewell.code, farewell.blamed,
                    mismatch ? farewell.text : retold(group, why, farewell.text),
                    mismatch ? "make the same calls in the same order on every rank"
                             : "look for the first rank that failed: this one is its victim");
  }
}

std::string farewell_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const RankError& failure) {
    const std::string rank =
        failure.blamed_rank() < 0 ? "" : fmt::format(", rank {}", failure.blamed_rank());
    return fmt::format("[{}{}] {}", code_name(failure.code()), rank, failure.message());
  } catch (const Error& failure) {
    return failure.message();
  } catch (const std::exception& failure) {
    return failure.what();
  } catch (...) {
    return "an unknown exception";
  }
}

std::vector<double> mean_factors(std::span<const Call> calls) {
  if (calls.front().reduce != ReduceOp::kMean) return {};
  double total = 0;
  for (const Call& call : calls) total += call.weight;
  if (total == 0) {
    throw Error(Code::kUsage, describe(calls.front()) + ": the weights of all ranks are zero",
                "give at least one rank a weight; a weight is usually its number of samples");
  }
  std::vector<double> factors;
  factors.reserve(calls.size());
  for (const Call& call : calls) factors.push_back(call.weight / total);
  return factors;
}

}  // namespace lockstep
