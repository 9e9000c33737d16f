#include "cli/verify/variants.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <numeric>
#include <regex>
#include <sstream>

#include "base/lists.hpp"
#include "launch/launcher.hpp"
#include "lockstep/error.hpp"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

constexpr int64_t kFewSteps = 5;
constexpr int64_t kMicroSteps = 2;
constexpr int64_t kKilledIn = 4;            // after the checkpoint of step 2
constexpr const char* kFreshFolder = "{}";  // as an argument of the program
constexpr std::chrono::seconds kHelpDeadline{20};
constexpr size_t kLongestHelp = 4096;  // of a flag: std::regex recurses for each character

// Sizes with which the course's programs take a second, unless the user named some: uneven over
// three and five ranks, and with several buckets.
const std::map<std::string, std::string> kSmallSizes = {
    {"--dim", "32"}, {"--hidden", "48"}, {"--bucket-mib", "0.004"}, {"--print-steps", "0"}};

std::string value_of(const Words& words, const ProgramFlags& flags, const std::string& flag) {
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == flag && i + 1 < words.size()) return words[i + 1];
    if (words[i].starts_with(flag + "=")) return words[i].substr(flag.size() + 1);
  }
  const auto found = flags.defaults.find(flag);
  return found == flags.defaults.end() ? "" : found->second;
}

int64_t number_of(const std::string& text) {
  int64_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

// Collects the variants of one family.
class Planner {
 public:
  Planner(const VerifyRequest& request, const ProgramFlags& flags)
      : request_(request),
        flags_(flags),
        words_(request.program.begin() + 1, request.program.end()) {}

  std::vector<Family> plan() {
    common_ = common_arguments();
    if (flags_.has("--amp") && !names_flag(words_, "--amp")) {
      add_family("float32", {"--amp", "off"});
      if (!request_.quick) add_family("bf16", {"--amp", "bf16"});
      if (!request_.quick && flags_.has("--master-weights") &&
          !names_flag(words_, "--master-weights")) {
        add_family("bf16, float32 masters", {"--amp", "bf16", "--master-weights"});
      }
    } else {
      add_family("", {});
    }
    add_virtual_shards();
    return std::move(families_);
  }

 private:
  Words common_arguments() const {
    Words common;
    if (flags_.has("--steps") && !names_flag(words_, "--steps")) {
      common.insert(common.end(), {"--steps", std::to_string(kFewSteps)});
    }
    for (const auto& [flag, value] : kSmallSizes) {
      if (flags_.has(flag) && !names_flag(words_, flag)) common.insert(common.end(), {flag, value});
    }
    if (flags_.has("--quiet")) common.push_back("--quiet");
    if (flags_.has("--capture")) common.insert(common.end(), {"--capture", "off"});
    return common;
  }

  bool varies_devices() const { return flags_.has("--devices") && !flags_.has("--backend"); }
  bool is_pipeline() const { return flags_.has("--stages") && flags_.has("--schedule"); }
  bool accumulates() const { return flags_.has("--accum-steps") && flags_.has("--batch"); }

  void add_family(const std::string& name, const Words& precision) {
    Family family{name, common_, {}};
    family.arguments.insert(family.arguments.end(), precision.begin(), precision.end());
    if (accumulates()) add(family.arguments, {"--accum-steps", "1"});
    if (is_pipeline()) {
      add(family.arguments,
          {"--stages", "1", "--micro-batches", "1", "--schedule", "gpipe", "--place", "same"});
    }
    if (varies_devices()) add(family.arguments, {"--devices", "cpu:1"});
    family_ = &family;
    add_counts_of(counts());
    add_accumulation();
    add_sharding();
    add_layouts();
    add_stages();
    add_resume();
    families_.push_back(std::move(family));
  }

  // One rank with virtual shards is a reference of its own, and more ranks must have its bits.
  void add_virtual_shards() {
    if (!flags_.has("--virtual-shards") || names_flag(words_, "--virtual-shards")) return;
    std::vector<int> ranks = counts();
    if (request_.ranks.empty() && !request_.quick) ranks = {2, 3, 4};
    int64_t shards = 1;
    for (const int count : ranks) shards = std::lcm(shards, count);
    const int64_t batch = flags_.number(words_, "--batch");
    const int64_t fitting = batch - batch % (kMicroSteps * shards);
    if (fitting == 0) return;
    Family family{"virtual shards", common_, {}};
    add(family.arguments, {"--virtual-shards", std::to_string(shards)});
    if (fitting != batch) {
      if (names_flag(words_, "--batch")) return;
      add(family.arguments, {"--batch", std::to_string(fitting)});
    }
    family_ = &family;
    add_counts_of(ranks);
    add_sharding();
    offer_layout("--shard", "3", "ZeRO 3");
    for (Variant& variant : family.variants) variant.facts.same_bits = true;
    families_.push_back(std::move(family));
  }

  static void add(Words& words, std::initializer_list<std::string> more) {
    words.insert(words.end(), more);
  }

  Variant& add_variant(const std::string& name, int ranks, Words arguments) {
    Variant variant{
        .name = name, .family = family_->name, .ranks = ranks, .arguments = std::move(arguments)};
    variant.facts = {.divides_rows = true, .ranks = ranks};
    family_->variants.push_back(std::move(variant));
    return family_->variants.back();
  }

  std::vector<int> counts() const {
    if (!request_.ranks.empty()) return request_.ranks;
    return request_.quick ? std::vector<int>{2, 3} : std::vector<int>{2, 3, 5};
  }

  void add_counts_of(const std::vector<int>& counts) {
    for (const int count : counts) {
      if (varies_devices()) {
        add_variant(fmt::format("{} devices", count), 1,
                    {"--devices", fmt::format("cpu:{}", count)});
      } else {
        add_variant(fmt::format("{} ranks", count), count, {});
      }
    }
  }

  void add_accumulation() {
    if (!accumulates()) return;
    const int64_t batch = flags_.number(words_, "--batch");
    if (batch < 6 * kMicroSteps || batch % kMicroSteps != 0) return;
    for (const int ranks : {1, 2, 3}) {
      if (request_.quick && ranks == 1) continue;
      Variant& variant = add_variant(
          fmt::format("{} rank{}, {} micro-steps", ranks, ranks == 1 ? "" : "s", kMicroSteps),
          ranks,
          {"--accum-steps", std::to_string(kMicroSteps), "--batch",
           std::to_string(batch / kMicroSteps)});
      variant.facts.micro_steps = kMicroSteps;
    }
  }

  void add_sharding() {
    const auto found = flags_.choices.find("--sharding");
    if (found == flags_.choices.end() || names_flag(words_, "--sharding")) return;
    for (const auto& stage : found->second) {
      if (stage == "off") continue;
      for (const int ranks : {2, 3}) {
        if (request_.quick && ranks == 3) continue;
        add_variant(fmt::format("{} ranks, {} sharded", ranks, stage), ranks,
                    {"--sharding", stage});
      }
    }
  }

  // Ways to divide a model that have a flag of their own, as those of examples/gpt2.
  void add_layouts() {
    if (is_pipeline()) return;
    offer_layout("--accumulate", "2", "2 micro-steps");
    offer_layout("--stages", "2", "2 stages");
    offer_layout("--tensor-parallel", "2", "matrices divided");
    if (request_.quick) return offer_layout("--shard", "3", "ZeRO 3");
    for (const char* stage : {"1", "2", "3"}) {
      offer_layout("--shard", stage, fmt::format("ZeRO {}", stage));
    }
  }

  void offer_layout(const std::string& flag, const std::string& value, const std::string& name) {
    if (flags_.has(flag) && !names_flag(words_, flag)) {
      add_variant(fmt::format("2 ranks, {}", name), 2, {flag, value});
    }
  }

  void add_stages() {
    if (!is_pipeline()) return;
    const auto found = flags_.choices.find("--schedule");
    const Words schedules = found == flags_.choices.end() ? Words{"gpipe"} : found->second;
    for (const auto& schedule : schedules) {
      add_pipeline(fmt::format("{} on 2 devices", schedule), 1, schedule, {"--place", "split"});
    }
    add_pipeline("2 pipelines of 2 devices", 2, "1f1b", {"--place", "same"});
    add_pipeline("a stage on each of 2 ranks", 2, "1f1b", {"--place", "ranks"});
    if (request_.quick) return;
    add_pipeline("2 pipelines of 2 ranks", 4, "1f1b", {"--place", "ranks"});
    if (flags_.has("--tensor-parallel")) {
      add_pipeline("2 stages of 2 ranks", 4, "1f1b",
                   {"--place", "ranks", "--tensor-parallel", "2"});
    }
  }

  void add_pipeline(const std::string& name, int ranks, const std::string& schedule, Words place) {
    const bool interleaved = schedule.find("interleaved") != std::string::npos;
    Words arguments = {"--stages", interleaved ? "4" : "2", "--micro-batches", "4", "--schedule",
                       schedule};
    arguments.insert(arguments.end(), place.begin(), place.end());
    add_variant(name, ranks, std::move(arguments));
  }

  void add_resume() {
    if (request_.quick || !flags_.has("--checkpoint") || names_flag(words_, "--checkpoint")) return;
    const int64_t steps = flags_.number(words_, "--steps");
    if (names_flag(words_, "--steps") && steps <= kKilledIn) return;
    const int ranks = varies_devices() ? 1 : 2;
    Variant& variant = add_variant("killed and resumed", ranks, {});
    for (const char* every : {"--checkpoint-every", "--save-every"}) {
      if (flags_.has(every)) add(variant.arguments, {every, "2"});
    }
    if (varies_devices()) add(variant.arguments, {"--devices", "cpu:2"});
    variant.launch = {"--max-restarts", "1", "--inject",
                      fmt::format("kill@rank={},step={}", ranks - 1, kKilledIn)};
    variant.saves = true;
    variant.facts.resumed_after = kKilledIn - 2;
  }

  const VerifyRequest& request_;
  const ProgramFlags& flags_;
  const Words words_;
  Words common_;
  Family* family_ = nullptr;
  std::vector<Family> families_;
};

}  // namespace

bool names_flag(const Words& words, const std::string& flag) {
  return std::any_of(words.begin(), words.end(), [&](const std::string& word) {
    return word == flag || word.starts_with(flag + "=");
  });
}

int64_t ProgramFlags::number(const Words& words, const std::string& flag) const {
  return number_of(value_of(words, *this, flag));
}

// A flag's text goes on in the next lines until another flag begins: "(default:" may stand in them.
ProgramFlags parse_help(const std::string& help) {
  ProgramFlags flags;
  std::istringstream lines(help);
  static const std::regex kFlag(R"(^\s+(?:-\w,\s*)?(--[a-z][a-z0-9-]*)(.*)$)");
  static const std::regex kDefault(R"(\[([^\]]*)\]|\(default: ([^)]*)\))");
  static const std::regex kChoices(R"(^\s+([\w-]+(?:\|[\w-]+)+))");
  std::string flag;
  std::string text;
  const auto finish = [&] {
    if (flag.empty()) return;
    text.resize(std::min(text.size(), kLongestHelp));
    std::smatch part;
    std::string value;
    if (std::regex_search(text, part, kDefault)) value = part[1].matched ? part[1] : part[2];
    flags.defaults.emplace(flag, value);
    if (std::regex_search(text, part, kChoices)) {
      const std::string words = part[1];
      for (const std::string_view word : split_list(words, '|')) {
        flags.choices[flag].emplace_back(word);
      }
    }
    flag.clear();
  };
  for (std::string line; std::getline(lines, line);) {
    line.resize(std::min(line.size(), kLongestHelp));
    std::smatch found;
    if (std::regex_match(line, found, kFlag)) {
      finish();
      flag = found[1];
      text = found[2];
    } else if (line.starts_with(" ")) {
      text += line.substr(line.find_first_not_of(' ') == std::string::npos
                              ? line.size()
                              : line.find_first_not_of(' ') - 1);
    } else {
      finish();
    }
  }
  finish();
  return flags;
}

std::vector<Family> plan_variants(const VerifyRequest& request, const ProgramFlags& flags) {
  return Planner(request, flags).plan();
}

RecordingsFolder::RecordingsFolder(fs::path path, bool keep) : path_(std::move(path)), keep_(keep) {
  fs::remove_all(path_);  // of a command that was killed
}

RecordingsFolder::~RecordingsFolder() {
  std::error_code ignored;
  if (!keep_) fs::remove_all(path_, ignored);
}

VerifyRunner::VerifyRunner(std::vector<std::string> program, const RecordingsFolder& recordings,
                           const Interrupts& interrupts)
    : path_(fs::absolute(find_program(
                             program.front(), [](const char* name) { return std::getenv(name); },
                             program_folders()))
                .string()),
      arguments_(program.begin() + 1, program.end()),
      recordings_(recordings),
      interrupts_(interrupts) {}

// Asked in a folder of its own: a program without flags begins to train.
ProgramFlags VerifyRunner::flags() const {
  const fs::path folder = recordings_.path() / "help";
  fs::create_directories(folder);
  ChildCommand command{.program = "/usr/bin/env",
                       .arguments = {"-C", folder.string(), path_},
                       .variables = {{"COLUMNS", "200"}},
                       .deadline = kHelpDeadline};
  // Words before the first flag may be a command of the program, which has flags of its own.
  for (const auto& word : arguments_) {
    if (word.starts_with("-")) break;
    command.arguments.push_back(word);
  }
  command.arguments.emplace_back("--help");
  try {
    const ChildResult result = run_child(command, interrupts_);
    return result.exit_code == 0 ? parse_help(result.output) : ProgramFlags();
  } catch (const Error&) {
    return {};
  }
}

bool VerifyRunner::Outcome::lacks_space() const {
  const std::string said = fmt::format("cannot write {}", fs::absolute(recording).string());
  return errors.find(said) != std::string::npos;
}

// "float32-2-ranks", or with a number if there is one already.
fs::path VerifyRunner::new_folder(const Variant& variant) const {
  std::string name;
  for (const char each : variant.family + " " + variant.name) {
    if (std::isalnum(static_cast<unsigned char>(each)) != 0) {
      name += each;
    } else if (!name.empty() && name.back() != '-') {
      name += '-';
    }
  }
  fs::path folder = recordings_.path() / name;
  for (int i = 2; fs::exists(folder); ++i) {
    folder = recordings_.path() / fmt::format("{}-{}", name, i);
  }
  fs::create_directories(folder);
  return folder;
}

void VerifyRunner::discard(const Outcome& outcome) const {
  if (!recordings_.is_kept()) fs::remove_all(outcome.recording);
}

VerifyRunner::Outcome VerifyRunner::run(const Variant& variant, const Words& family_arguments,
                                        std::map<std::string, std::string> variables,
                                        std::chrono::seconds limit) const {
  const fs::path folder = new_folder(variant);
  variables["LOCKSTEP_VERIFY_DIR"] = fs::absolute(folder).string();
  ChildCommand command{
      .program = sibling_path("lockstep"),
      .arguments = {"run", "--nproc-per-node", std::to_string(variant.ranks), "--quiet"},
      .variables = std::move(variables),
      .deadline = std::min(3 * limit, kLongestRun)};
  auto& words = command.arguments;
  const auto add = [&words](const Words& more) {
    words.insert(words.end(), more.begin(), more.end());
  };
  const std::string seconds = std::to_string(limit.count());
  add({"--timeout", seconds, "--step-timeout", seconds});
  add(variant.launch);
  words.push_back(path_);
  for (const auto& word : arguments_) {
    words.push_back(word == kFreshFolder ? (folder / "fresh").string() : word);
  }
  add(family_arguments);
  add(variant.arguments);
  if (variant.saves) add({"--checkpoint", (folder / "checkpoints").string()});
  const ChildResult result = run_child(command, interrupts_);
  return {folder, result.exit_code, result.errors, result.seconds};
}

}  // namespace lockstep::cli
