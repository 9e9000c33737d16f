#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/descriptor.hpp"
#include "lockstep/error.hpp"

namespace lockstep {

/// A descriptor that is readable between raise() and clear(). Any thread may call both.
class Wake {
 public:
  Wake() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (event_.get() < 0) {
      throw Error(Code::kRendezvous, std::string("cannot make an eventfd: ") + std::strerror(errno),
                  "raise the limit of open files: ulimit -n");
    }
  }

  int descriptor() const { return event_.get(); }

  void raise() {
    const uint64_t one = 1;
    // Full, it is readable anyway.
    [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
  }

  void clear() {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_.get(), &count, sizeof count);
  }

 private:
  Descriptor event_;
};

}  // namespace lockstep
