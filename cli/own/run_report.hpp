#pragma once

#include <string>
#include <vector>

#include "cli/lab/lab.hpp"

namespace lockstep::cli {

/// The runs of one set-up under the name that a report gives them.
struct NamedRuns {
  std::string name;
  RunSet set_up;
};

/// Tables and charts of any records: set-up, time, devices, communication, buckets, ranks,
/// precision, memory and stages, each only where a record has something to say about it.
LabReport report_on_runs(const std::string& title, const std::vector<NamedRuns>& runs);

}  // namespace lockstep::cli
