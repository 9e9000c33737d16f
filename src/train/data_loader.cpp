#include <pthread.h>
#include <sched.h>

#include "lockstep/data_loader.hpp"
#include "lockstep/device.hpp"
#include "lockstep/rank_environment.hpp"

namespace lockstep {
namespace {

// Without a launcher's word, those that this process had at the start.
std::vector<int> cores_of_job() {
  const std::string given = RankEnvironment::from_env().host_cores;
  return given.empty() ? detect_hardware().cores : parse_cores(given);
}

}  // namespace

struct HostCores::Saved {
  cpu_set_t cores;
};

HostCores::HostCores() {
  Saved saved{};
  cpu_set_t all;
  CPU_ZERO(&saved.cores);
  CPU_ZERO(&all);
  for (const int core : cores_of_job()) CPU_SET(static_cast<size_t>(core), &all);
  if (pthread_getaffinity_np(pthread_self(), sizeof(saved.cores), &saved.cores) != 0) return;
  if (pthread_setaffinity_np(pthread_self(), sizeof(all), &all) != 0) return;
  saved_ = std::make_unique<Saved>(saved);
}

HostCores::~HostCores() {
  if (saved_) pthread_setaffinity_np(pthread_self(), sizeof(saved_->cores), &saved_->cores);
}

}  // namespace lockstep
