#include "base/fault.hpp"

#include <dirent.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <thread>

#include "base/lists.hpp"
#include "lockstep/error.hpp"

namespace lockstep {
namespace {

struct FaultForm {
  FaultKind kind;
  std::string_view name;
  std::string_view amount;  // the name of Fault::amount; "" if it has none
  int64_t usual;            // amount that is not given
};

constexpr std::array kForms = {FaultForm{FaultKind::kKill, "kill", "", 0},
                               FaultForm{FaultKind::kStop, "stop", "", 0},
                               FaultForm{FaultKind::kExit, "exit", "code", 1},
                               FaultForm{FaultKind::kSlow, "slow", "ms", 100},
                               FaultForm{FaultKind::kNan, "nan", "", 0},
                               FaultForm{FaultKind::kMismatch, "mismatch", "", 0},
                               FaultForm{FaultKind::kNetcut, "netcut", "", 0}};

[[noreturn]] void fail_fault(std::string_view text, const std::string& reason) {
  std::vector<std::string_view> names;
  for (const FaultForm& form : kForms) names.push_back(form.name);
  throw Error(Code::kUsage, fmt::format("cannot inject \"{}\": {}", text, reason),
              fmt::format("write it like kill@rank=1,step=5 or slow@rank=0,step=3,ms=200; faults "
                          "are {}",
                          fmt::join(names, ", ")));
}

const FaultForm& form_of(FaultKind kind) {
  return *std::find_if(kForms.begin(), kForms.end(),
                       [kind](const FaultForm& form) { return form.kind == kind; });
}

std::optional<int64_t> whole_number(std::string_view digits) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool whole = error == std::errc() && end == digits.data() + digits.size() && value >= 0;
  return whole ? std::optional(value) : std::nullopt;
}

Fault parse_fault(std::string_view text) {
  const size_t at = text.find('@');
  const std::string_view name = text.substr(0, at);
  const auto* const form = std::find_if(
      kForms.begin(), kForms.end(), [name](const FaultForm& each) { return each.name == name; });
  if (form == kForms.end()) fail_fault(text, fmt::format("there is no fault \"{}\"", name));
  if (at == std::string_view::npos) fail_fault(text, "rank and step are missing");
  Fault fault{.kind = form->kind, .amount = form->usual};
  bool has_rank = false;
  bool has_step = false;
  for (const std::string_view part : split_list(text.substr(at + 1), ',')) {
    const size_t equals = std::min(part.find('='), part.size());
    const std::string_view key = part.substr(0, equals);
    const auto value = whole_number(part.substr(std::min(equals + 1, part.size())));
    if (!value) fail_fault(text, fmt::format("\"{}\" is not a name and a whole number", part));
    if (key == "rank" && *value <= 1'000'000) {
      fault.rank = static_cast<int>(*value);
      has_rank = true;
    } else if (key == "step" && *value >= 1) {
      fault.step = *value;
      has_step = true;
    } else if (!form->amount.empty() && key == form->amount && *value <= 1'000'000) {
      fault.amount = *value;
    } else {
      fail_fault(text, fmt::format("\"{}\" does not belong there; steps count from 1", part));
    }
  }
  if (!has_rank || !has_step) {
    fail_fault(text, fmt::format("{} is missing", has_rank ? "step" : "rank"));
  }
  if (fault.kind == FaultKind::kExit && fault.amount > 255) fail_fault(text, "codes end at 255");
  return fault;
}

bool is_network_socket(int descriptor) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof(address);
  if (::getpeername(descriptor, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return false;
  return address.ss_family == AF_INET || address.ss_family == AF_INET6;
}

// The other ends see a closed connection, as they would if a switch had reset it.
void cut_network() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), ::closedir);
  if (folder == nullptr) return;
  while (const dirent* entry = ::readdir(folder.get())) {
    const auto descriptor = whole_number(entry->d_name);
    if (!descriptor || !is_network_socket(static_cast<int>(*descriptor))) continue;
    ::shutdown(static_cast<int>(*descriptor), SHUT_RDWR);
  }
}

FaultInjector injector_from_environment() {
  const char* faults = std::getenv("LOCKSTEP_INJECT");
  const char* rank = std::getenv("RANK");
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  if (faults == nullptr || rank == nullptr) return {{}, 0};
  if (restarts != nullptr && std::string_view(restarts) != "0") return {{}, 0};
  return {parse_faults(faults), static_cast<int>(whole_number(rank).value_or(0))};
}

}  // namespace

std::vector<Fault> parse_faults(std::string_view text) {
  std::vector<Fault> faults;
  for (const std::string_view part : split_list(text, ';')) faults.push_back(parse_fault(part));
  return faults;
}

std::string format_faults(const std::vector<Fault>& faults) {
  std::vector<std::string> texts;
  for (const Fault& fault : faults) {
    const FaultForm& form = form_of(fault.kind);
    texts.push_back(fmt::format("{}@rank={},step={}", form.name, fault.rank, fault.step));
    if (!form.amount.empty()) texts.back() += fmt::format(",{}={}", form.amount, fault.amount);
  }
  return fmt::format("{}", fmt::join(texts, ";"));
}

FaultInjector::FaultInjector(const std::vector<Fault>& faults, int rank) {
  std::copy_if(faults.begin(), faults.end(), std::back_inserter(faults_),
               [rank](const Fault& fault) { return fault.rank == rank; });
}

FaultInjector& FaultInjector::of_process() {
  static FaultInjector injector = injector_from_environment();
  return injector;
}

void FaultInjector::begin_step(int64_t step) {
  if (faults_.empty()) return;
  counts_steps_ = true;
  step_ = step;
  happen();
}

void FaultInjector::begin_backward() {
  if (faults_.empty() || counts_steps_) return;
  ++step_;
  happen();
}

bool FaultInjector::take(FaultKind kind) {
  const auto due = std::find_if(faults_.begin(), faults_.end(), [&](const Fault& fault) {
    return fault.kind == kind && fault.step == step_;
  });
  if (due == faults_.end()) return false;
  faults_.erase(due);
  return true;
}

void FaultInjector::happen() {
  for (const Fault& fault : faults_) {
    if (fault.kind == FaultKind::kSlow && step_ >= fault.step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(fault.amount));
    }
    if (fault.step != step_) continue;
    if (fault.kind == FaultKind::kKill) ::kill(::getpid(), SIGKILL);
    if (fault.kind == FaultKind::kStop) ::kill(::getpid(), SIGSTOP);
    if (fault.kind == FaultKind::kExit) std::_Exit(static_cast<int>(fault.amount));
    if (fault.kind == FaultKind::kNetcut) cut_network();
  }
}

}  // namespace lockstep
