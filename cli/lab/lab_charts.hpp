#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cli/lab/lab_results.hpp"
#include "report/chart.hpp"

namespace lockstep::cli {

/// A set-up with the name a chart gives it.
using NamedSet = std::pair<std::string, const RunSet*>;

/// Bars of what each peak is made of; set-ups that recorded no split have none.
BarChart memory_chart(const std::string& title, const std::vector<NamedSet>& set_ups);

/// The losses of each set-up's first run over optimizer steps.
LineChart loss_chart(const std::string& title, const std::vector<NamedSet>& set_ups);

}  // namespace lockstep::cli
