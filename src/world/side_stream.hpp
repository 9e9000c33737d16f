#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "device/own_stream.hpp"

namespace lockstep {

/// A stream of a communicator's own, in whose order calls happen that were begun and not yet waited
/// for: what the backend queues there holds nobody back, so that a backward computes on while its
/// buckets travel.
class SideStream {
 public:
  explicit SideStream(int gpu)
      : own_(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(gpu))) {}

  c10::Stream stream() const { return own_.get(); }

  /// What is queued here from now on starts after what the thread's current stream holds.
  void follow_current() const { order(current(), stream()); }

  /// What the thread's current stream is given from now on starts after what is queued here.
  void hold_back_current() const { order(stream(), current()); }

 private:
  c10::Stream current() const {
    return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(stream().device());
  }

  static void order(c10::Stream first, c10::Stream then) {
    if (first == then) return;
    c10::Event event(c10::DeviceType::CUDA);
    event.record(first);
    event.block(then);
  }

  const OwnStream own_;
};

}  // namespace lockstep
