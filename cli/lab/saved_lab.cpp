#include "cli/lab/saved_lab.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/file.hpp"
#include "base/json_text.hpp"
#include "lockstep/error.hpp"
#include "report/document.hpp"

namespace lockstep::cli {
namespace {

using nlohmann::json;

constexpr int kSavedLabSchema = 1;

struct SizeField {
  const char* name;
  std::optional<int64_t> LabOptions::*value;
};

constexpr SizeField kSizeFields[] = {{"steps", &LabOptions::steps},
                                     {"batch", &LabOptions::batch},
                                     {"dim", &LabOptions::dim},
                                     {"hidden", &LabOptions::hidden},
                                     {"depth", &LabOptions::depth}};

json options_to_json(const LabOptions& options) {
  json sizes = json::object();
  for (const auto& [name, value] : kSizeFields) {
    if (options.*value) sizes[name] = *(options.*value);
  }
  return {{"devices", options.devices},
          {"out", options.out},
          {"quick", options.quick},
          {"sizes", std::move(sizes)},
          {"own", options.own}};
}

// The parts of lab.json that the JSON library would take from a wrong type or range.
int64_t whole_number(const json& saved, int64_t least, int64_t most) {
  const auto number = whole_number_in(saved, least, most);
  if (!number) throw json::other_error::create(500, "a number is out of range", &saved);
  return *number;
}

// A report copies records under these names: none may lead out of its folder.
std::string record_name(const json& saved) {
  auto name = saved.get<std::string>();
  if (name.empty() || name.front() == '.' || name.find_first_of({"/\0", 2}) != std::string::npos) {
    throw json::other_error::create(500, "a record has a name that is no file's", &saved);
  }
  return name;
}

LabOptions options_from_json(const json& saved) {
  LabOptions options{.devices = saved.at("devices").get<std::string>(),
                     .out = saved.at("out").get<std::string>(),
                     .quick = saved.at("quick").get<bool>(),
                     .own = saved.at("own").get<std::map<std::string, std::string>>()};
  for (const auto& [name, value] : kSizeFields) {
    if (saved.at("sizes").contains(name))
      options.*value = whole_number(saved.at("sizes").at(name), 0, INT64_MAX);
  }
  return options;
}

json experiment_to_json(const Experiment& experiment) {
  json keys = json::array();
  for (const auto& [what, size] : experiment.keys) keys.push_back(json::array({what, size}));
  return {{"name", experiment.name}, {"devices", experiment.devices}, {"keys", std::move(keys)}};
}

Experiment experiment_from_json(const json& saved) {
  Experiment experiment;
  experiment.name = record_name(saved.at("name"));
  experiment.devices = static_cast<int>(whole_number(saved.at("devices"), 1, INT32_MAX));
  for (const auto& key : saved.at("keys")) {
    experiment.keys.push_back(
        {key.at(0).get<std::string>(), whole_number(key.at(1), INT64_MIN, INT64_MAX)});
  }
  return experiment;
}

SavedLab lab_from_json(const json& saved) {
  SavedLab lab{.lab = saved.at("lab").get<std::string>(),
               .command = saved.at("command").get<std::string>(),
               .date = whole_number(saved.at("date"), 0, kLastDate),
               .others_busy_cores = saved.at("others_busy_cores").get<double>(),
               .options = options_from_json(saved.at("options")),
               .experiments = {},
               .author = saved.value("author", "")};
  for (const auto& experiment : saved.at("experiments")) {
    lab.experiments.push_back(experiment_from_json(experiment));
  }
  return lab;
}

}  // namespace

void save_lab(const SavedLab& lab, const std::filesystem::path& folder) {
  json experiments = json::array();
  for (const auto& each : lab.experiments) experiments.push_back(experiment_to_json(each));
  const json saved = {{"schema", kSavedLabSchema},
                      {"lab", lab.lab},
                      {"command", lab.command},
                      {"date", lab.date},
                      {"others_busy_cores", lab.others_busy_cores},
                      {"options", options_to_json(lab.options)},
                      {"experiments", std::move(experiments)},
                      {"author", lab.author}};
  write_file_atomically((folder / kSavedLab).string(),
                        saved.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
}

SavedLab read_saved_lab(const std::filesystem::path& folder) {
  const std::string path = (folder / kSavedLab).string();
  const std::string help = "run the lab again, or name its records one by one";
  const json saved = parse_json(read_text_file(path)).value_or(nullptr);
  if (!saved.is_object()) {
    throw Error(Code::kRecord, fmt::format("{} is not a JSON object", path), help);
  }
  if (saved.value("schema", json()) != kSavedLabSchema) {
    throw Error(Code::kRecord,
                fmt::format("{} has the schema {}, and this lockstep reads {}", path,
                            saved.value("schema", json()).dump(), kSavedLabSchema),
                help);
  }
  try {
    return lab_from_json(saved);
  } catch (const json::exception& error) {
    throw Error(Code::kRecord, fmt::format("{} is damaged", path), help, {describe(error)});
  }
}

LabRuns saved_runs(const SavedLab& lab, const std::filesystem::path& folder) {
  LabRuns runs{.sets = {}, .others_busy_cores = lab.others_busy_cores, .options = lab.options};
  for (const auto& experiment : lab.experiments) {
    const auto record = folder / "records" / (experiment.name + ".json");
    runs.add(experiment, read_record(record.string()));
  }
  return runs;
}

}  // namespace lockstep::cli
