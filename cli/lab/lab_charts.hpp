#pragma once

#include <string>
#include <vector>

#include "cli/lab/lab_tables.hpp"
#include "report/chart.hpp"

namespace lockstep::cli {

/// Stacked bars of what each peak is made of; a set-up that recorded no split has none.
BarChart memory_chart(const std::string& title, const std::vector<SetRow>& set_ups);

/// Bars of the peak of each device under these set-ups.
BarChart peak_chart(const std::vector<SetRow>& set_ups);

/// The losses of each set-up's first run over optimizer steps.
LineChart loss_chart(const std::string& title, const std::vector<SetRow>& set_ups);

/// Mean step times with their deviations over the sizes of the set-ups.
LineSeries step_series(const std::string& name, const std::vector<RunSet>& set_ups);

}  // namespace lockstep::cli
