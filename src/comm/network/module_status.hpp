#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "comm/network/transport_module.h"

/// How a module tells lockstep that a call of its C interface failed. Only modules include this.
namespace lockstep::transport_module {

/// A transfer whose deadline passed.
struct Late : std::runtime_error {
  Late() : std::runtime_error("the deadline passed") {}
};

/// A transfer that abort() ended.
struct Aborted : std::runtime_error {
  Aborted() : std::runtime_error("aborted") {}
};

inline LockstepTransportStatus tell(LockstepTransportMessage* message,
                                    LockstepTransportStatus status, const char* text) {
  if (message != nullptr) {
    const size_t kept = std::min(std::strlen(text), sizeof(message->text) - 1);
    std::memcpy(message->text, text, kept);
    message->text[kept] = '\0';
  }
  return status;
}

/// The one way out of a module: whatever `action` throws ends here.
template <class Action>
LockstepTransportStatus guarded(LockstepTransportMessage* message, Action&& action) noexcept {
  try {
    action();
    return LOCKSTEP_TRANSPORT_OK;
  } catch (const Late& error) {
    return tell(message, LOCKSTEP_TRANSPORT_LATE, error.what());
  } catch (const Aborted& error) {
    return tell(message, LOCKSTEP_TRANSPORT_ABORTED, error.what());
  } catch (const std::exception& error) {
    return tell(message, LOCKSTEP_TRANSPORT_FAILED, error.what());
  } catch (...) {
    return tell(message, LOCKSTEP_TRANSPORT_FAILED, "an unknown exception");
  }
}

}  // namespace lockstep::transport_module
