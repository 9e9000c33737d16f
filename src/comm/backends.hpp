#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/backend.hpp"
#include "net/store.hpp"

// Every backend there is, and how each is made.

namespace lockstep {

/// One rank: every operation is the identity.
std::unique_ptr<Backend> make_self_backend();

/// Ranks of one host that share memory. `session` is the same text on all ranks of a job and on no
/// others of this user.
struct ShmOptions {
  std::string session;
  int rank = 0;
  int size = 1;
  int64_t deadline_ns = 0;  ///< for all ranks to meet
};
std::unique_ptr<Backend> make_shm_backend(const ShmOptions& options);

/// The same between threads of this process: [rank].
std::vector<std::unique_ptr<Backend>> make_shm_thread_backends(int size);

/// Ranks on any hosts, over TCP.
struct GlooOptions {
  std::shared_ptr<Store> store;  ///< through which the ranks exchange addresses
  int rank = 0;
  int size = 1;
  std::string address;      ///< this host's address that the others can reach
  int64_t deadline_ns = 0;  ///< for all ranks to meet
};
std::unique_ptr<Backend> make_gloo_backend(const GlooOptions& options);

}  // namespace lockstep
