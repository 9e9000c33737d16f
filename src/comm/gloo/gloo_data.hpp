#pragma once

#include <string>

#include "comm/gloo/gloo_link.hpp"
#include "comm/gloo/gloo_loader.hpp"

namespace lockstep {

/// Gloo's connections of one rank to its group, owned.
class GlooData {
 public:
  /// Exchanges Gloo's addresses over the link and connects. kRendezvous where that fails.
  GlooData(const Group& group, const std::string& address, GlooLink& link, int64_t deadline_ns);
  ~GlooData() { api_.destroy(context_); }
  GlooData(const GlooData&) = delete;
  GlooData& operator=(const GlooData&) = delete;

  /// How a transfer ended.
  struct Outcome {
    LockstepGlooStatus status = LOCKSTEP_GLOO_OK;
    std::string text;  ///< Gloo's own words, unless all went well
  };

  /// `transfer(api, context, call)` calls one of the module's transfers. `tag` tells transfers
  /// apart that overlap in time.
  template <class Transfer>
  Outcome run(uint32_t tag, int64_t deadline_ns, Transfer&& transfer) {
    LockstepGlooMessage message{};
    const LockstepGlooCall call{deadline_ns, tag, &message};
    const LockstepGlooStatus status = transfer(api_, context_, call);
    return {status, message.text};
  }

  /// From any thread: ends all transfers here and at the peers.
  void abort() { api_.abort(context_); }

 private:
  void connect(const Group& group, GlooLink& link, int64_t deadline_ns);

  const LockstepGlooApi& api_;
  LockstepGlooContext* context_ = nullptr;
};

}  // namespace lockstep
