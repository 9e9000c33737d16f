#pragma once

#include <chrono>
#include <string>

namespace lockstep::cli {

/// Shows how far a list of experiments has come, on standard error: a bar with the time left on a
/// terminal, one line per experiment otherwise.
class Progress {
 public:
  Progress(int experiments, double total_weight);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void begin(const std::string& title, double weight);
  void tick();  ///< redraws the bar
  void end();   ///< the experiment that began last is done

 private:
  using Clock = std::chrono::steady_clock;

  double seconds_left() const;

  const bool bar_;
  const int experiments_;
  const double total_weight_;
  Clock::time_point begun_;
  int done_ = 0;
  double done_weight_ = 0;
  double weight_ = 0;   // of the experiment that runs
  double spent_s_ = 0;  // in experiments that are done
  std::string title_;
};

}  // namespace lockstep::cli
