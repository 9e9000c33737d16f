#pragma once

#include <string>
#include <vector>

#include "cli/lab/lab_tables.hpp"
#include "report/chart.hpp"

namespace lockstep::cli {

/// Bars of the mean step time of each set-up, with its deviation. `name` is that of the bars.
BarChart time_chart(const std::string& title, const std::string& name,
                    const std::vector<SetRow>& set_ups);

/// Stacked bars of what each peak is made of; a set-up that recorded no split has none.
BarChart memory_chart(const std::string& title, const std::vector<SetRow>& set_ups);

/// Bars of the peak of each device under these set-ups.
BarChart peak_chart(const std::vector<SetRow>& set_ups);

/// The losses of each set-up's first run over optimizer steps.
LineChart loss_chart(const std::string& title, const std::vector<SetRow>& set_ups);

/// Mean step times with their deviations over the sizes of the set-ups.
LineSeries step_series(const std::string& name, const std::vector<RunSet>& set_ups);

/// The buckets of a run's last step below its backward; many buckets share rows.
Timeline bucket_timeline(const std::string& title, const RunRecord& run);

/// A row for each device in the order of ranks and stages, from the first of the actions on. Labels
/// begin with the prefix, and name ranks if asked for.
std::vector<TimelineRow> action_rows(const PipelineRecord& pipeline,
                                     const std::vector<ActionRecord>& actions,
                                     const std::string& prefix, bool name_ranks);

/// What the colours of these rows mean.
std::vector<std::string> action_legend(const std::vector<TimelineRow>& rows);

}  // namespace lockstep::cli
