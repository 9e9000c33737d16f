#include "cli/ckpt.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "base/counted.hpp"
#include "base/file.hpp"
#include "base/json_text.hpp"
#include "checkpoint/compare.hpp"
#include "checkpoint/reader.hpp"
#include "checkpoint/store.hpp"
#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"
#include "lockstep/table.hpp"
#include "lockstep/units.hpp"
#include "lockstep/version.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::vector<Example> kCkptExamples = {
    {"lockstep ckpt ls runs/a", "the checkpoints of a run"},
    {"lockstep ckpt verify runs/a", "is every byte what was written?"},
    {"lockstep ckpt diff runs/a runs/b", "how do their latest ones differ?"},
    {"lockstep ckpt prune runs/a --keep 2", "keep the two latest good ones"},
    {"lockstep ckpt import runs/a --step 9 *.safetensors --values v.json", "from PyTorch"}};

// The checkpoints that a path means: itself, or those of a run's folder.
std::vector<CheckpointEntry> entries_of(const std::string& path) {
  if (fs::exists(path + "/" + kManifestName)) return {{0, path}};
  if (!fs::is_directory(path)) {
    throw Error(
        Code::kFileRead,
        fmt::format("{} is neither a checkpoint nor a folder that contains checkpoints", path),
        "name a run's folder, such as runs/a, or one of its checkpoints");
  }
  auto entries = list_checkpoints(path);
  // A folder that is named like a checkpoint and has no manifest is a damaged one.
  if (entries.empty() && fs::path(path).filename().string().starts_with("step-")) {
    return {{0, path}};
  }
  if (entries.empty()) {
    throw Error(Code::kFileRead, fmt::format("{} has no checkpoints", path),
                "name a run's folder, such as runs/a, or one of its checkpoints");
  }
  return entries;
}

// Why a checkpoint is not good; empty if it is. `thorough` reads every byte.
std::string damage_of(const std::string& path, bool thorough) {
  try {
    const CheckpointReader reader(path);
    if (thorough) reader.verify();
    return "";
  } catch (const Error& error) {
    if (!is_damage(error)) throw;
    return error.message();
  }
}

json number_of(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : "inf";
}

const char* kind_text(Difference::Kind kind) {
  switch (kind) {
    case Difference::Kind::kValues:
      return "differs";
    case Difference::Kind::kOnlyFirst:
      return "only in the first";
    case Difference::Kind::kOnlySecond:
      return "only in the second";
    case Difference::Kind::kOtherShape:
      return "another shape";
    case Difference::Kind::kOtherDtype:
      return "another dtype";
  }
  return "";
}

void print(const Table& table) {
  fmt::print("{}", table.terminal(may_style(STDOUT_FILENO)));
}

void print(const json& value) {
  fmt::print("{}\n", value.dump(2, ' ', false, json::error_handler_t::replace));
}

std::string section_of(const std::string& file) {
  const fs::path path(file);
  if (path.extension() != ".safetensors") {
    throw Error(Code::kUsage, fmt::format("{} is not a safetensors file", file),
                "name files such as model.safetensors; the part before the dot becomes the name");
  }
  return path.stem().string();
}

}  // namespace

CkptCommand::CkptCommand(CLI::App& app)
    : command_(app.add_subcommand("ckpt", "list, verify, compare and remove checkpoints")) {
  command_->footer(format_examples(kCkptExamples));
  command_->require_subcommand(1);
  const auto add = [&](const char* name, const char* what) {
    auto* sub = command_->add_subcommand(name, what);
    sub->footer("");
    sub->add_flag("--json", json_, "print one JSON object");
    return sub;
  };
  ls_ = add("ls", "list the checkpoints of a run");
  ls_->add_option("DIR", folder_, "a run's folder")->required()->type_name("");
  verify_ = add("verify", "compare every byte with the checksums");
  verify_->add_option("PATH", path_, "a run's folder, or one checkpoint")
      ->required()
      ->type_name("");
  diff_ = add("diff", "how two checkpoints differ: the largest |a - b| of each tensor");
  diff_->add_option("A", first_, "a checkpoint, or a run's folder for its latest")
      ->required()
      ->type_name("");
  diff_->add_option("B", second_, "another")->required()->type_name("");
  prune_ = add("prune", "remove old checkpoints");
  prune_->add_option("DIR", folder_, "a run's folder")->required()->type_name("");
  prune_->add_option("--keep", keep_, "how many good ones to keep")
      ->required()
      ->check(CLI::Range(1, 1'000'000))
      ->type_name("N");
  import_ = add("import", "make a checkpoint of safetensors files, such as PyTorch's weights");
  import_->add_option("DIR", folder_, "a run's folder")->required()->type_name("");
  import_->add_option("FILES", files_, "NAME.safetensors for each part: model, optimizer")
      ->required()
      ->type_name("");
  import_->add_option("--step", step_, "after which step it counts as saved")
      ->required()
      ->check(CLI::Range(int64_t{0}, int64_t{999'999'999'999'999}))
      ->type_name("N");
  import_->add_option("--values", values_, "a JSON object with the value of each part")
      ->type_name("FILE");
}

int CkptCommand::run() const {
  if (ls_->parsed()) return list();
  if (verify_->parsed()) return verify();
  if (diff_->parsed()) return diff();
  if (prune_->parsed()) return prune();
  return import_files();
}

int CkptCommand::list() const {
  const auto entries = entries_of(folder_);
  Table table("", {{"step", Align::kRight},
                   {"saved"},
                   {"ranks", Align::kRight},
                   {"tensors", Align::kRight},
                   {"size", Align::kRight},
                   {"parts"},
                   {"state"}});
  json all = json::array();
  for (const auto& entry : entries) {
    try {
      const Manifest manifest = CheckpointReader(entry.path).manifest();
      std::set<std::string> parts;
      for (const auto& tensor : manifest.tensors) parts.insert(tensor.section);
      for (const auto& [section, value] : manifest.values.items()) parts.insert(section);
      table.add_row({std::to_string(manifest.step), manifest.created,
                     std::to_string(manifest.ranks), std::to_string(manifest.tensors.size()),
                     format_bytes(manifest.bytes()), fmt::format("{}", fmt::join(parts, " ")),
                     "complete"});
      all.push_back({{"path", entry.path},
                     {"step", manifest.step},
                     {"created", manifest.created},
                     {"ranks", manifest.ranks},
                     {"tensors", manifest.tensors.size()},
                     {"bytes", manifest.bytes()},
                     {"parts", parts},
                     {"damage", ""}});
    } catch (const Error& error) {
      table.add_row({std::to_string(entry.step), "", "", "", "", "", error.message()});
      all.push_back({{"path", entry.path}, {"step", entry.step}, {"damage", error.message()}});
    }
  }
  if (json_) {
    print(json{{"checkpoints", all}});
  } else {
    table.add_note("`lockstep ckpt verify` reads every byte; this list reads manifests and sizes.");
    print(table);
  }
  return 0;
}

int CkptCommand::verify() const {
  json all = json::array();
  bool damaged = false;
  for (const auto& entry : entries_of(path_)) {
    const std::string damage = damage_of(entry.path, true);
    damaged = damaged || !damage.empty();
    all.push_back({{"path", entry.path}, {"good", damage.empty()}, {"damage", damage}});
    if (json_) continue;
    fmt::print("{}: {}\n", entry.path, damage.empty() ? "good" : "damaged: " + damage);
  }
  if (json_) print(json{{"checkpoints", all}});
  return damaged ? 1 : 0;
}

int CkptCommand::diff() const {
  const CheckpointReader first(entries_of(first_).back().path);
  const CheckpointReader second(entries_of(second_).back().path);
  const auto differences = compare(first, second);
  if (json_) {
    json all = json::array();
    for (const auto& each : differences) {
      all.push_back({{"part", each.section},
                     {"tensor", each.name},
                     {"difference", kind_text(each.kind)},
                     {"elements", each.elements},
                     {"largest", number_of(each.largest)}});
    }
    print(json{{"first", first.path()},
               {"second", second.path()},
               {"tensors", first.manifest().tensors.size()},
               {"differences", all}});
    return differences.empty() ? 0 : 1;
  }
  if (differences.empty()) {
    fmt::print("{} and {} are the same, bit for bit: {}, max |a - b| = 0\n", first.path(),
               second.path(), counted(first.manifest().tensors.size(), "tensor"));
    return 0;
  }
  Table table(fmt::format("{} against {}", first.path(), second.path()),
              {{"part"},
               {"tensor"},
               {"difference"},
               {"elements", Align::kRight},
               {"max |a - b|", Align::kRight}});
  for (const auto& each : differences) {
    const bool values = each.kind == Difference::Kind::kValues && !each.name.empty();
    table.add_row({each.section, each.name.empty() ? "(value)" : each.name, kind_text(each.kind),
                   values ? std::to_string(each.elements) : "",
                   values ? fmt::format("{:.3g}", each.largest) : ""});
  }
  print(table);
  return 1;
}

int CkptCommand::prune() const {
  if (!fs::is_directory(folder_)) entries_of(folder_);  // says what is wrong
  CheckpointStore store(folder_);
  auto entries = list_checkpoints(folder_);
  int good = 0;
  json removed = json::array();
  json damaged = json::array();
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    if (good < keep_) {
      const bool is_good = damage_of(entry->path, true).empty();
      good += is_good ? 1 : 0;
      if (!is_good) damaged.push_back(entry->path);
    } else {
      store.remove(*entry);
      removed.push_back(entry->path);
    }
  }
  if (json_) {
    print(json{{"removed", removed}, {"damaged", damaged}, {"kept", good}});
    return 0;
  }
  for (const auto& path : removed) fmt::print("removed {}\n", path.get<std::string>());
  for (const auto& path : damaged) {
    fmt::print("{} is damaged; it was left and not counted\n", path.get<std::string>());
  }
  fmt::print("{} kept\n", good);
  return 0;
}

int CkptCommand::import_files() const {
  Manifest manifest;
  manifest.step = step_;
  manifest.ranks = 1;
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::string created(20, '\0');
  std::strftime(created.data(), created.size() + 1, "%Y-%m-%dT%H:%M:%SZ", &parts);
  manifest.created = created;
  manifest.lockstep = kVersion;
  if (!values_.empty()) {
    const json given = parse_json(read_text_file(values_)).value_or(nullptr);
    if (!given.is_object()) {
      throw Error(Code::kFileFormat, fmt::format("{} is not a JSON object", values_),
                  "write {\"name of a part\": its value, ...}");
    }
    for (const auto& [section, value] : given.items()) manifest.values[section] = {{"all", value}};
  }
  CheckpointStore store(folder_);
  const std::string draft = store.begin(step_);
  try {
    for (const auto& file : files_) {
      const std::string section = section_of(file);
      const SafetensorsReader reader(file);
      reader.verify();
      std::vector<std::vector<std::byte>> contents;
      SectionFile made{section, section + ".safetensors", {}, {}};
      for (const auto& info : reader.tensors()) {
        auto& bytes = contents.emplace_back(static_cast<size_t>(info.bytes()));
        reader.read(info, bytes);
        made.tensors.push_back({info.name, info.dtype, info.shape, bytes});
        made.slices.push_back(whole_slice(info.shape));
      }
      const auto written = write_section(FileSystem::system(), draft, made);
      manifest.files.push_back(written.file);
      manifest.tensors.insert(manifest.tensors.end(), written.tensors.begin(),
                              written.tensors.end());
    }
    manifest.tensors = merge_pieces(std::move(manifest.tensors));
    const std::string path = store.publish(draft, manifest);
    if (json_) {
      print(json{{"path", path}, {"tensors", manifest.tensors.size()}});
    } else {
      fmt::print("{}: {}\n", path, counted(manifest.tensors.size(), "tensor"));
    }
    return 0;
  } catch (...) {
    store.discard(draft);
    throw;
  }
}

}  // namespace lockstep::cli
