#include "course/options.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <filesystem>

#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"

namespace course {
namespace {

using lockstep::Code;
using lockstep::Error;

constexpr int64_t kLargestSize = 1 << 20;

void require_range(const char* flag, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  throw Error(Code::kUsage, fmt::format("{} {} is out of range", flag, value),
              fmt::format("give a whole number from {} to {}", least, most));
}

// A run of an hour must not fail at its end because its output has nowhere to go.
void require_writable_folder(const char* flag, const std::string& path) {
  if (path.empty() || path == "-") return;
  const auto folder = std::filesystem::absolute(path).parent_path();
  if (std::filesystem::is_directory(path)) {
    throw Error(Code::kFileWrite, fmt::format("{} {}: that is a folder", flag, path),
                "name a file in it");
  }
  if (std::filesystem::is_directory(folder)) return;
  throw Error(Code::kFileWrite,
              fmt::format("{} {}: there is no folder {}", flag, path, folder.string()),
              "make the folder first, or name a file in one that exists");
}

void require_readable(const char* flag, const std::string& path) {
  if (path.empty() || std::filesystem::is_regular_file(path)) return;
  throw Error(Code::kFileRead, fmt::format("{} {}: there is no such file", flag, path),
              "name a safetensors file; --save writes one");
}

void check(const Options& options) {
  require_range("--steps", options.steps, 1, 100'000'000);
  require_range("--batch", options.batch, 1, 1 << 24);
  require_range("--dim", options.dim, 1, kLargestSize);
  require_range("--hidden", options.hidden, 1, kLargestSize);
  require_range("--depth", options.depth, 0, 10'000);
  require_range("--seed", options.seed, 0, INT64_MAX);
  if (!std::isfinite(options.lr) || options.lr <= 0) {
    throw Error(Code::kUsage, fmt::format("--lr {} is not a learning rate", options.lr),
                "give a number above 0");
  }
  if (options.model == "transformer") {
    throw Error(Code::kUsage, fmt::format("{} trains the mlp only", options.program),
                "leave --model out");
  }
  if (options.model != "mlp") {
    throw Error(Code::kUsage, fmt::format("--model \"{}\" is unknown", options.model),
                "use --model mlp");
  }
  if (options.optimizer != "sgd" && options.optimizer != "adamw") {
    throw Error(Code::kUsage, fmt::format("--optimizer \"{}\" is unknown", options.optimizer),
                "use sgd or adamw");
  }
  require_readable("--init", options.init);
  require_readable("--data", options.data);
  require_writable_folder("--json", options.json);
  require_writable_folder("--trace", options.trace);
  require_writable_folder("--save", options.save);
}

}  // namespace

Options parse_options(const Program& program, int argc, char** argv) {
  Options options;
  options.program = program.name;
  CLI::App app(program.about, program.name);
  // As in most commands: a wrapper's defaults can be overridden by what follows them.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--steps", options.steps, "optimizer updates")->capture_default_str();
  app.add_option("--batch", options.batch, "rows of one step over all devices")
      ->capture_default_str();
  app.add_option("--dim", options.dim, "width of input and output")->capture_default_str();
  app.add_option("--hidden", options.hidden, "width of the hidden layers")->capture_default_str();
  app.add_option("--depth", options.depth, "hidden-to-hidden layers")->capture_default_str();
  auto* lr =
      app.add_option("--lr", options.lr, "learning rate (default: 0.5 for sgd, 0.001 for adamw)");
  app.add_option("--seed", options.seed, "of initial weights and generated batches")
      ->capture_default_str();
  app.add_option("--model", options.model, "mlp")->capture_default_str();
  app.add_option("--optimizer", options.optimizer, "sgd or adamw")->capture_default_str();
  app.add_option(
      "--devices", options.devices,
      "logical devices: cpu:4, cuda, cuda:0,1 or cuda:0*4 (default: every GPU, or cpu:2)");
  app.add_option("--json", options.json, "write the result record here; - is standard output");
  app.add_option("--trace", options.trace, "write a timeline here; ui.perfetto.dev opens it");
  app.add_option("--init", options.init, "start from these weights (safetensors)");
  app.add_option("--save", options.save, "write the trained weights here (safetensors)");
  app.add_option("--data", options.data, "train on tensors x and y of this file (safetensors)");
  app.add_flag("--quiet", options.quiet, "print nothing but errors");
  if (program.has_print_shapes) {
    app.add_flag("--print-shapes", options.print_shapes,
                 "print the device and shape each replica sees");
  }
  lockstep::parse_or_throw(app, argc, argv);
  if (lr->count() == 0) options.lr = options.optimizer == "adamw" ? 1e-3 : 0.5;
  check(options);
  return options;
}

std::map<std::string, std::string> Options::as_text() const {
  return {{"steps", std::to_string(steps)},
          {"batch", std::to_string(batch)},
          {"dim", std::to_string(dim)},
          {"hidden", std::to_string(hidden)},
          {"depth", std::to_string(depth)},
          {"lr", fmt::format("{}", lr)},
          {"seed", std::to_string(seed)},
          {"model", model},
          {"optimizer", optimizer},
          {"devices", devices},
          {"init", init},
          {"data", data}};
}

}  // namespace course
