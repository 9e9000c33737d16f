#pragma once

#include <torch/data/dataloader.h>

#include <memory>
#include <utility>

namespace lockstep {

/// Guard: threads that this thread starts may use all of the job's cores on this host. The launcher
/// gives a rank cores of its own, and new threads inherit them: a loader's workers would take time
/// from the training that waits for them, even where other cores are idle.
class HostCores {
 public:
  HostCores();
  ~HostCores();
  HostCores(const HostCores&) = delete;
  HostCores& operator=(const HostCores&) = delete;

 private:
  struct Saved;
  std::unique_ptr<Saved> saved_;  // the cores of this thread; null if they are unknown
};

/// torch::data::make_data_loader, with workers that may use all of the host's cores.
template <class Dataset, class Sampler>
auto make_data_loader(Dataset dataset, Sampler sampler,
                      const torch::data::DataLoaderOptions& options = {}) {
  const HostCores workers_cores;
  return torch::data::make_data_loader(std::move(dataset), std::move(sampler), options);
}

}  // namespace lockstep
