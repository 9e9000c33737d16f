#include "base/stack.hpp"

#include <cxxabi.h>
#include <execinfo.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <memory>

namespace lockstep {
namespace {

constexpr int kFrames = 64;
constexpr int kOfDelivery = 2;  // the handler, and the kernel's return from it

int stack_file = -1;  // opened before it is needed

// Everything here may be called in a signal handler, backtrace() since its library was loaded.
void write_stack(int /*signal*/) {
  const int error = errno;
  std::array<void*, kFrames> frames{};
  const int count = ::backtrace(frames.data(), kFrames);
  if (count > kOfDelivery) {
    ::backtrace_symbols_fd(frames.data() + kOfDelivery, count - kOfDelivery, stack_file);
  }
  constexpr std::string_view kEnd = "end\n";
  [[maybe_unused]] const auto written = ::write(stack_file, kEnd.data(), kEnd.size());
  errno = error;
}

std::string demangled(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : name;
}

}  // namespace

int stack_signal() {
  return SIGRTMIN + 5;
}

void write_stack_on_request() {
  const char* path = std::getenv("LOCKSTEP_STACK_FILE");
  if (path == nullptr || stack_file >= 0) return;
  stack_file = ::open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (stack_file < 0) return;
  std::array<void*, 1> first{};
  ::backtrace(first.data(), 1);  // loads what the handler must not
  struct sigaction action {};
  action.sa_handler = write_stack;
  action.sa_flags = SA_RESTART;
  ::sigaction(stack_signal(), &action, nullptr);
}

bool writes_stack(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  constexpr std::string_view kCaught = "SigCgt:";
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(kCaught)) continue;
    const uint64_t caught = std::strtoull(line.c_str() + kCaught.size(), nullptr, 16);
    return (caught >> (stack_signal() - 1) & 1U) != 0;
  }
  return false;
}

// A line of glibc: "path/module(symbol+0x12) [0x7f...]", without a symbol "path/module(+0x12)
// [...]".
std::vector<std::string> functions_in_stack(std::string_view text) {
  std::vector<std::string> functions;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t open = line.rfind('(');
    const size_t close = line.rfind(')');
    if (open == std::string_view::npos || close == std::string_view::npos || close < open) continue;
    const std::string_view inside = line.substr(open + 1, close - open - 1);
    const std::string_view symbol = inside.substr(0, inside.rfind('+'));
    const std::string_view module = line.substr(0, open);
    const std::string_view file = module.substr(module.rfind('/') + 1);
    functions.push_back(symbol.empty() ? fmt::format("{}{}", file, inside)
                                       : demangled(std::string(symbol)));
  }
  return functions;
}

}  // namespace lockstep
