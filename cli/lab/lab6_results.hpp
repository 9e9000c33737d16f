#pragma once

#include <vector>

#include "cli/lab/lab_results.hpp"

namespace lockstep::cli {

/// All the records of one lab 6; tables and answers are functions of this.
struct Lab6Results {
  RunSet single;
  std::vector<RunSet> data_parallel;  ///< ascending by devices
  std::vector<RunSet> distributed;    ///< DDP with as many ranks, place by place
  double others_busy_cores = 0;       ///< cores that other programs kept busy when the lab began

  /// Place of the set-ups to look at closely: the most ranks that each have hardware of their own,
  /// or the most of all where only one does.
  size_t focus() const;
};

Lab6Results collect_lab6(const Finished& finished);

/// How far the busiest device is from the least busy one, and the fullest from the emptiest.
struct Imbalance {
  double least_busy = 0;
  double most_busy = 0;
  double memory = 1;  ///< device 0's peak over the others' mean

  double busy_gap() const { return most_busy - least_busy; }
};

Imbalance imbalance_of(const RunSet& set_up);

}  // namespace lockstep::cli
