#include "cli/own/comparison.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/file.hpp"
#include "base/json_text.hpp"
#include "cli/lab/lab_charts.hpp"
#include "cli/lab/lab_tables.hpp"
#include "cli/lab/lab_text.hpp"
#include "cli/own/run_report.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"
#include "lockstep/version.hpp"
#include "report/document.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kComparisonSchema = 1;
constexpr const char* kSyntax = "write lockstep compare -- ./mine --a vs ./mine --b";

std::string shell_text(const std::vector<std::string>& words) {
  std::vector<const char*> pointers;
  for (const auto& word : words) pointers.push_back(word.c_str());
  return shell_line(static_cast<int>(pointers.size()), pointers.data());
}

using Words = std::vector<std::string>;

// How many words all sides have in common at the start, or at the end where they are reversed.
size_t common_words(const std::vector<Words>& sides) {
  size_t common = 0;
  const auto shared = [&](const Words& words) {
    return common < words.size() && words[common] == sides.front()[common];
  };
  while (common < sides.front().size() && std::all_of(sides.begin(), sides.end(), shared)) ++common;
  return common;
}

// The words in which the sides differ, with the flag whose values they are; the program's name
// where a side has none of its own. Letters where that would make a table too wide.
std::vector<std::string> names_of(const std::vector<ComparedSide>& sides) {
  constexpr size_t kLongestName = 28;
  std::vector<Words> words;
  for (const auto& side : sides) words.push_back(side.command);
  size_t prefix = common_words(words);
  const auto is_value = [prefix](const Words& each) {
    return prefix < each.size() && !each[prefix].starts_with("-");
  };
  if (prefix > 0 && std::any_of(words.begin(), words.end(), is_value)) --prefix;
  for (auto& each : words) {
    each.erase(each.begin(), each.begin() + static_cast<long>(prefix));
    std::reverse(each.begin(), each.end());
  }
  const size_t suffix = common_words(words);
  std::vector<std::string> names;
  for (size_t i = 0; i < sides.size(); ++i) {
    words[i].erase(words[i].begin(), words[i].begin() + static_cast<long>(suffix));
    std::reverse(words[i].begin(), words[i].end());
    std::string name = words[i].empty() ? fs::path(sides[i].command.front()).filename().string()
                                        : shell_text(words[i]);
    while (std::find(names.begin(), names.end(), name) != names.end()) name += " again";
    names.push_back(std::move(name));
  }
  const auto is_long = [](const std::string& name) { return name.size() > kLongestName; };
  if (sides.size() <= 26 && std::any_of(names.begin(), names.end(), is_long)) {
    for (size_t i = 0; i < names.size(); ++i) names[i] = static_cast<char>('A' + i);
  }
  return names;
}

// Wall times as step times, so that they are compared as those are.
RunSet wall_runs(const ComparedSide& side) {
  RunSet set_up;
  for (const double seconds : side.wall_s) {
    RunRecord run;
    const std::vector<double> ms = {seconds * 1000};
    run.step_ms = summarize(ms);
    set_up.runs.push_back(std::move(run));
  }
  return set_up;
}

std::string unsafe_reason(double others_busy_cores, const Comparison& comparison) {
  if (others_busy_cores >= kDisturbingCores) {
    return fmt::format("other programs kept {:.1f} cores busy when it began", others_busy_cores);
  }
  if (!comparison.unsafe) return "";
  return fmt::format("times varied by {:.0f} % between runs", comparison.noise * 100);
}

// "A is 1.23 ± 0.05 times faster than B", from what took longer and what took less.
std::string conclusion(const std::string& fast, const std::string& slow,
                       const Comparison& comparison) {
  if (comparison.speedup.mean - 1 <= comparison.margin()) {
    return fmt::format("{} and {} differ by no more than the noise ({} times).", fast, slow,
                       format_speedup(comparison));
  }
  return fmt::format("{} is {} times faster than {}.", fast, format_speedup(comparison), slow);
}

// The sides by mean time, the fastest first.
struct Ranking {
  std::vector<SetRow> rows;                 // in the order of the sides
  std::vector<size_t> order;                // indices of rows
  std::vector<Comparison> against_fastest;  // [row]

  explicit Ranking(std::vector<SetRow> all) : rows(std::move(all)) {
    const auto mean = [this](size_t i) { return pooled_step_ms(*rows[i].set_up).mean; };
    for (size_t i = 0; i < rows.size(); ++i) order.push_back(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return mean(a) < mean(b); });
    for (const auto& row : rows) {
      against_fastest.push_back(compare(*row.set_up, *rows[order.front()].set_up));
    }
  }

  std::string fastest() const { return rows[order.front()].name; }

  std::string sentences() const {
    std::string text;
    for (size_t i = 1; i < order.size(); ++i) {
      text += text.empty() ? "" : " ";
      text += conclusion(fastest(), rows[order[i]].name, against_fastest[order[i]]);
    }
    return text;
  }

  // Why no conclusion can be trusted; empty: they can.
  std::string doubt(double others_busy_cores) const {
    for (const auto& comparison : against_fastest) {
      const std::string reason = unsafe_reason(others_busy_cores, comparison);
      if (!reason.empty()) return reason;
    }
    return "";
  }
};

Table wall_table(const Ranking& ranking) {
  Table table("Wall time", {{"command"},
                            {"time", Align::kRight},
                            {"range", Align::kRight},
                            {"runs", Align::kRight},
                            {"relative", Align::kRight}});
  for (size_t i = 0; i < ranking.rows.size(); ++i) {
    const SetRow& row = ranking.rows[i];
    const Stats wall = pooled_step_ms(*row.set_up);
    table.add_row(
        {row.name, format_step_ms(wall.mean, wall.stddev), format_range(wall), count_cell(wall.n),
         i == ranking.order.front() ? count_cell(1) : format_speedup(ranking.against_fastest[i])});
  }
  table.add_note(
      "From start to end of the program, mean ± deviation. The runs took turns, after one of each "
      "that does not count. Relative: to the fastest.");
  return table;
}

Table commands_table(const SavedComparison& comparison) {
  Table table("Commands", {{"name"}, {"command"}});
  for (const auto& side : comparison.sides) table.add_row({side.name, shell_text(side.command)});
  return table;
}

fs::path record_path(const fs::path& folder, const std::string& name) {
  return folder / "records" / (name + ".json");
}

// The records of one side; none if a run left none.
RunSet side_records(const SavedComparison& comparison, size_t side, const fs::path& folder) {
  RunSet set_up;
  for (size_t run = 0; run < comparison.sides[side].wall_s.size(); ++run) {
    const fs::path path = record_path(folder, compared_record(comparison, side, run));
    if (!fs::exists(path)) return {};
    set_up.runs.push_back(read_record(path.string()));
  }
  set_up.devices = static_cast<int>(set_up.first().devices.size());
  return set_up;
}

std::string last_losses(const std::vector<NamedRuns>& measured) {
  std::vector<std::string> texts;
  for (const auto& [name, set_up] : measured) {
    const auto& losses = set_up.first().losses;
    if (!losses.empty()) texts.push_back(fmt::format("{:.4g} with {}", losses.back(), name));
  }
  return texts.empty() ? "No losses were recorded." : "The last loss was " + listed(texts) + ".";
}

std::time_t date_from_json(const json& saved) {
  const auto date = whole_number_in(saved, 0, kLastDate);
  if (!date) throw json::other_error::create(500, "the date is out of range", &saved);
  return *date;
}

SavedComparison comparison_from_json(const json& saved) {
  SavedComparison comparison{.title = saved.at("title").get<std::string>(),
                             .command = saved.at("command").get<std::string>(),
                             .date = date_from_json(saved.at("date")),
                             .others_busy_cores = saved.at("others_busy_cores").get<double>(),
                             .sides = {},
                             .author = saved.value("author", "")};
  for (const auto& side : saved.at("sides")) {
    comparison.sides.push_back({.name = side.at("name").get<std::string>(),
                                .command = side.at("command").get<std::vector<std::string>>(),
                                .wall_s = side.at("wall_s").get<std::vector<double>>()});
  }
  return comparison;
}

}  // namespace

std::vector<ComparedSide> compared_sides(const std::vector<std::string>& words,
                                         const std::vector<std::string>& names) {
  std::vector<ComparedSide> sides(1);
  for (const auto& word : words) {
    if (word == "vs") {
      sides.emplace_back();
    } else {
      sides.back().command.push_back(word);
    }
  }
  if (sides.size() < 2) {
    throw Error(Code::kUsage, "there is nothing to compare with: the word vs is missing", kSyntax);
  }
  for (const auto& side : sides) {
    if (side.command.empty()) {
      throw Error(Code::kUsage, "there is no command on one side of vs", kSyntax);
    }
  }
  if (!names.empty() && names.size() != sides.size()) {
    throw Error(
        Code::kUsage,
        fmt::format("--names has {} for {} commands", counted(names.size(), "name"), sides.size()),
        "give a name to each: --names a,b");
  }
  const auto chosen = names.empty() ? names_of(sides) : names;
  for (size_t i = 0; i < sides.size(); ++i) sides[i].name = chosen[i];
  return sides;
}

std::string compared_record(const SavedComparison& comparison, size_t side, size_t run) {
  std::string slug;
  for (const char c : comparison.sides[side].name) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                       c == '.' || c == '_';
    if (plain) {
      slug += c;
    } else if (!slug.empty() && slug.back() != '-') {
      slug += '-';
    }
    if (slug.size() >= 40) break;
  }
  return fmt::format("{}-{}{}run{}", side + 1, slug, slug.empty() || slug.back() == '-' ? "" : "-",
                     run + 1);
}

void save_comparison(const SavedComparison& comparison, const fs::path& folder) {
  json sides = json::array();
  for (const auto& side : comparison.sides) {
    sides.push_back({{"name", side.name}, {"command", side.command}, {"wall_s", side.wall_s}});
  }
  const json saved = {{"schema", kComparisonSchema},
                      {"title", comparison.title},
                      {"command", comparison.command},
                      {"date", comparison.date},
                      {"others_busy_cores", comparison.others_busy_cores},
                      {"sides", std::move(sides)},
                      {"author", comparison.author}};
  write_file_atomically((folder / kSavedComparison).string(),
                        saved.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
}

SavedComparison read_comparison(const fs::path& folder) {
  const std::string path = (folder / kSavedComparison).string();
  const std::string help = "compare again, or name the records one by one";
  const json saved = parse_json(read_text_file(path)).value_or(nullptr);
  if (!saved.is_object()) {
    throw Error(Code::kRecord, fmt::format("{} is not a JSON object", path), help);
  }
  if (saved.value("schema", json()) != kComparisonSchema) {
    throw Error(Code::kRecord,
                fmt::format("{} has the schema {}, and this lockstep reads {}", path,
                            saved.value("schema", json()).dump(), kComparisonSchema),
                help);
  }
  SavedComparison comparison;
  try {
    comparison = comparison_from_json(saved);
  } catch (const json::exception& error) {
    throw Error(Code::kRecord, fmt::format("{} is damaged", path), help, {describe(error)});
  }
  if (comparison.sides.size() < 2) {
    throw Error(Code::kRecord, fmt::format("{} compares fewer than two commands", path), help);
  }
  for (const auto& side : comparison.sides) {
    if (side.wall_s.empty()) {
      throw Error(Code::kRecord,
                  fmt::format("{} has no times of {}: it was not finished", path, side.name), help);
    }
  }
  return comparison;
}

std::vector<std::string> compared_records(const SavedComparison& comparison,
                                          const fs::path& folder) {
  std::vector<std::string> names;
  for (size_t side = 0; side < comparison.sides.size(); ++side) {
    for (size_t run = 0; run < comparison.sides[side].wall_s.size(); ++run) {
      names.push_back(compared_record(comparison, side, run));
      if (!fs::exists(record_path(folder, names.back()))) names.pop_back();
    }
  }
  return names;
}

LabReport comparison_report(const SavedComparison& comparison, const fs::path& folder) {
  std::vector<NamedRuns> walls;
  std::vector<NamedRuns> measured;
  std::vector<std::string> unmeasured;
  for (size_t side = 0; side < comparison.sides.size(); ++side) {
    const std::string& name = comparison.sides[side].name;
    walls.push_back({name, wall_runs(comparison.sides[side])});
    RunSet records = side_records(comparison, side, folder);
    if (records.runs.empty()) {
      unmeasured.push_back(name);
    } else {
      measured.push_back({name, std::move(records)});
    }
  }
  const auto rows_of_all = [](const std::vector<NamedRuns>& all) {
    std::vector<SetRow> rows;
    for (const auto& each : all) rows.push_back({each.name, &each.set_up});
    return rows;
  };
  const Ranking by_wall(rows_of_all(walls));

  LabReport report;
  if (measured.empty()) {
    report.stamp.host = describe_host();
    report.stamp.versions = {{"lockstep", kVersion}};
  } else {
    report = report_on_runs(comparison.title, measured);
  }
  report.title = comparison.title;
  Table wall = wall_table(by_wall);
  if (!unmeasured.empty()) {
    wall.add_note(
        fmt::format("Without a record, which a program leaves by lockstep::save_record, only the "
                    "time is known: "
                    "{}.",
                    listed(unmeasured)));
  }
  report.tables.insert(report.tables.begin(),
                       {{"wall", wall}, {"commands", commands_table(comparison)}});
  report.figures.insert(report.figures.begin(),
                        {time_chart("Wall time", "wall time", by_wall.rows),
                         "From start to end of the program: mean and deviation of all runs."});

  std::string doubt = by_wall.doubt(comparison.others_busy_cores);
  report.answers = {{"comparison", "Which is faster, from start to end?", by_wall.sentences()}};
  if (measured.size() == comparison.sides.size()) {
    const Ranking by_step(rows_of_all(measured));
    if (doubt.empty()) doubt = by_step.doubt(comparison.others_busy_cores);
    report.answers.push_back(
        {"comparison", "Which takes less time for a step?", by_step.sentences()});
    report.answers.push_back({"comparison", "Do they train equally well?", last_losses(measured)});
  }
  if (!doubt.empty()) {
    report.warning = fmt::format(
        "These times cannot be relied on: {}. Close other programs and compare again, with more "
        "--runs.",
        doubt);
  }
  return report;
}

}  // namespace lockstep::cli
