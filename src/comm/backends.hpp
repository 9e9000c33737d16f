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

// GPU backends, of builds with CUDA only. Each stands on a host backend of the same ranks, over
// which calls are compared, and which must outlive it. Collective.
struct GpuBackendOptions {
  Backend* host = nullptr;
  int gpu = 0;              ///< of this rank, as CUDA counts
  int64_t deadline_ns = 0;  ///< for all ranks to meet
};

/// Ranks of one host, on one GPU or on GPUs that reach each other's memory: CUDA IPC memory and
/// events.
std::unique_ptr<Backend> make_ipc_backend(const GpuBackendOptions& options);

/// Ranks with a GPU each, on any hosts.
std::unique_ptr<Backend> make_nccl_backend(const GpuBackendOptions& options);

}  // namespace lockstep
