#include "trainer.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numbers>
#include <optional>

#include "hugging_face.hpp"
#include "lockstep/clock.hpp"
#include "tokenizer.hpp"

namespace gpt2 {
namespace {

using lockstep::Code;
using lockstep::Error;

void require_divisible(const TrainOptions& options, int data_ranks) {
  const int64_t parts = options.accumulate * data_ranks;
  if (options.accumulate < 1 || options.batch % parts != 0) {
    throw Error(Code::kUsage,
                fmt::format("--batch {} cannot be divided into --accumulate {} on {} data ranks",
                            options.batch, options.accumulate, data_ranks),
                fmt::format("give a multiple of {}", std::max<int64_t>(1, parts)));
  }
  const int64_t shards = options.layout.virtual_shards;
  if (shards % data_ranks != 0) {
    throw Error(
        Code::kUsage,
        fmt::format("--virtual-shards {} cannot be divided over {} data ranks", shards, data_ranks),
        "give a multiple of every number of data ranks that you will use");
  }
  if (shards > 0 && options.batch % (options.accumulate * shards) != 0) {
    throw Error(Code::kUsage,
                fmt::format("--batch {} cannot be divided into --accumulate {} of {} parts",
                            options.batch, options.accumulate, shards),
                fmt::format("give a multiple of {}", options.accumulate * shards));
  }
}

// Matrices and embeddings decay, norms and biases do not.
lockstep::AdamW make_optimizer(const std::vector<NamedParameter>& parameters,
                               const TrainOptions& options) {
  std::vector<torch::Tensor> decayed, others;
  for (const auto& [name, parameter] : parameters) {
    const bool decays = !name.ends_with("bias") && name.find("ln") == std::string::npos;
    (decays ? decayed : others).push_back(parameter);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  const auto add = [&](std::vector<torch::Tensor>& members, double decay) {
    if (members.empty()) return;
    auto of_group = std::make_unique<torch::optim::AdamWOptions>(options.lr);
    of_group->betas({0.9, 0.95}).weight_decay(decay);
    groups.emplace_back(members, std::move(of_group));
  };
  add(decayed, options.weight_decay);
  add(others, 0);
  return lockstep::AdamW(std::move(groups),
                         lockstep::AdamWOptions{.lr = options.lr, .beta2 = 0.95});
}

void set_rate(lockstep::AdamW& optimizer, double rate) {
  for (auto& group : optimizer.param_groups()) {
    static_cast<torch::optim::AdamWOptions&>(group.options()).lr(rate);
  }
}

// The rows of one data rank, in as many parts as are accumulated.
std::vector<Batch> own_parts(const Batch& all, const TrainOptions& options,
                             const lockstep::Communicator& data) {
  std::vector<Batch> parts;
  const int64_t rows = options.batch / options.accumulate / data.size();
  for (int64_t part = 0; part < options.accumulate; ++part) {
    const int64_t first = (part * data.size() + data.rank()) * rows;
    parts.push_back({all.x.narrow(0, first, rows), all.y.narrow(0, first, rows)});
  }
  return parts;
}

double mean_over(const lockstep::Communicator& data, double value) {
  const auto sum = torch::full({1}, value, torch::kFloat64);
  data.all_reduce(sum, lockstep::ReduceOp::kSum, {.label = "loss"});
  return sum.item<double>() / data.size();
}

// Windows of a file that are evaluated together. They have one length: a shorter last one is alone.
struct Windows {
  int64_t first;
  int64_t count;
};

std::vector<Windows> plan_validation(const TokenFile& file, const TrainOptions& options,
                                     int64_t rows) {
  int64_t windows = count_windows(file, options.config.context);
  if (options.validate_windows > 0) windows = std::min(windows, options.validate_windows);
  const int64_t whole = std::min(windows, (file.size() - 1) / options.config.context);
  std::vector<Windows> plan;
  for (int64_t first = 0; first < whole; first += rows) {
    plan.push_back({first, std::min(rows, whole - first)});
  }
  if (windows > whole) plan.push_back({whole, 1});
  return plan;
}

// The mean loss of the file's windows. Data ranks take turns and make the same number of calls.
double validate(ParallelModel& model, const TokenFile& file, const TrainOptions& options,
                const lockstep::Communicator& data) {
  const int64_t rows = options.batch / options.accumulate / data.size();
  const int64_t multiple = options.layout.sequence_parallel ? options.layout.tensor_parallel : 1;
  const auto plan = plan_validation(file, options, rows);
  const auto sums = torch::zeros({2}, torch::kFloat64);  // loss, targets
  for (size_t turn = 0; turn < plan.size(); turn += static_cast<size_t>(data.size())) {
    const size_t own = turn + static_cast<size_t>(data.rank());
    const auto [first, count] = plan[own < plan.size() ? own : 0];
    const auto batch =
        pad_batch(read_windows(file, first, count, options.config.context), 1, multiple);
    const auto [loss, targets] = model.evaluate(batch);
    if (own >= plan.size()) continue;  // a turn that only the others needed
    sums[0] += loss * static_cast<double>(targets);
    sums[1] += static_cast<double>(targets);
  }
  data.all_reduce(sums, lockstep::ReduceOp::kSum, {.label = "validation loss"});
  return (sums[0] / sums[1]).item<double>();
}

// How many bytes of text a token of this file stands for; nothing without a tokenizer.
std::optional<double> bytes_per_token(const std::string& folder, const TokenFile& file) {
  if (!std::filesystem::exists(folder + "/vocab.json")) return {};
  const auto tokenizer = Tokenizer::load(folder);
  const auto tokens = file.read(1, file.size() - 1);
  int64_t bytes = 0;
  for (int64_t i = 0; i < tokens.size(0); ++i) {
    bytes += static_cast<int64_t>(
        tokenizer.bytes_of(static_cast<int>(tokens.data_ptr<int64_t>()[i])).size());
  }
  return static_cast<double>(bytes) / static_cast<double>(tokens.size(0));
}

class Reporter {
 public:
  explicit Reporter(bool prints) : prints_(prints) {}
  template <class... Values>
  void say(fmt::format_string<Values...> format, Values&&... values) const {
    if (prints_) fmt::print(format, std::forward<Values>(values)...);
  }

 private:
  bool prints_;
};

// Before training, and not when there are weights to lose.
void require_folder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const auto trial = std::filesystem::path(folder) / ".lockstep-trial";
  const bool takes_files = !error && std::ofstream(trial).good();
  std::filesystem::remove(trial, error);
  if (takes_files) return;
  throw Error(Code::kFileWrite, fmt::format("--out {}: no file can be written there", folder),
              "name a folder that you may write to");
}

void save_model(const TrainOptions& options, ParallelModel& model, bool writes) {
  const auto weights = model.whole_weights();
  if (!writes) return;
  write_published(options.out, options.config, weights);
  for (const char* name : {"vocab.json", "merges.txt"}) {
    const auto from = std::filesystem::path(options.data) / name;
    if (!std::filesystem::exists(from)) continue;
    std::filesystem::copy_file(from, std::filesystem::path(options.out) / name,
                               std::filesystem::copy_options::overwrite_existing);
  }
}

}  // namespace

double rate_at(const TrainOptions& options, int64_t step) {
  if (step <= options.warmup) {
    return options.lr * static_cast<double>(step) / static_cast<double>(options.warmup);
  }
  const double share = static_cast<double>(step - options.warmup) /
                       static_cast<double>(std::max<int64_t>(1, options.steps - options.warmup));
  const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * std::min(1.0, share)));
  return options.min_lr + cosine * (options.lr - options.min_lr);
}

int train(const TrainOptions& given) {
  TrainOptions options = given;
  const auto world = lockstep::World::from_env();
  const lockstep::UseDevice home(world.device());
  const Reporter report(world.rank() == 0);
  if (!options.out.empty() && world.rank() == 0) require_folder(options.out);
  const auto mesh = make_mesh(world.comm(), options.layout);
  const auto& data = mesh.axis("dp");
  require_divisible(options, data.size());

  Weights weights(options.seed);
  if (!options.init.empty()) {
    auto published = read_published(options.init);
    published.config.dropout = options.config.dropout;
    options.config = published.config;
    weights = Weights(std::move(published.weights));
  }
  const TokenFile tokens(options.data + "/train.bin", options.config.vocabulary);
  const TokenFile held_out(options.data + "/val.bin", options.config.vocabulary);
  // The ranks of one model draw the same dropout masks, data ranks others. With virtual shards each
  // part has its own, on whatever rank.
  const bool in_parts = options.layout.virtual_shards > 0;
  torch::manual_seed(options.seed * 1000 + (in_parts ? 0 : static_cast<uint64_t>(data.rank())));

  const auto model = make_parallel_model(options.config, weights, options.layout, mesh,
                                         world.device(), options.bf16);
  auto optimizer = make_optimizer(model->parameters(), options);
  report.say(
      "{} parameters, {} train and {} validation tokens; {} rank{}: dp {}, pp {}, tp {}{}{}\n",
      options.config.parameters(), tokens.size(), held_out.size(), world.size(),
      world.size() == 1 ? "" : "s", data.size(), options.layout.stages,
      options.layout.tensor_parallel, options.layout.sequence_parallel ? ", sequence parallel" : "",
      options.layout.shard > 0 ? fmt::format(", ZeRO {}", options.layout.shard) : "");

  std::optional<lockstep::Checkpoint> checkpoint;
  int64_t step = 0;
  if (!options.checkpoint.empty()) {
    checkpoint.emplace(options.checkpoint, world.comm(),
                       lockstep::CheckpointOptions{.every = options.save_every});
    model->add_to(*checkpoint, optimizer);
    step = checkpoint->resume();
    if (step > 0) report.say("resumed after step {}\n", step);
  }
  const auto bytes = bytes_per_token(options.data, held_out);
  const auto say_validation = [&](int64_t after) {
    const double loss = validate(*model, held_out, options, data);
    report.say("step {:5}: validation loss {:.6f} nats per token", after, loss);
    if (bytes) {
      report.say(", {:.4f} bits per byte ({:.3f} bytes per token)",
                 loss / (*bytes * std::numbers::ln2), *bytes);
    }
    report.say("\n");
  };

  const int64_t begin_ns = lockstep::monotonic_ns();
  const int64_t first = step;
  while (step < options.steps) {
    ++step;
    const auto batch =
        draw_batch(tokens, options.batch, options.config.context, options.seed, step);
    const double own_loss = model->accumulate(own_parts(batch, options, data));
    const double loss = in_parts ? own_loss : mean_over(data, own_loss);
    const double rate = rate_at(options, step);
    set_rate(optimizer, rate);
    const auto norm = optimizer.step({.max_norm = options.max_norm, .zero_grad = true});
    if (step % options.log_every == 0 || step == options.steps) {
      const double seconds = static_cast<double>(lockstep::monotonic_ns() - begin_ns) * 1e-9;
      const double per_second =
          static_cast<double>((step - first) * options.batch * options.config.context) / seconds;
      report.say("step {:5}: loss {:.6f}, norm {:.4f}, lr {:.3e}, {:.0f} tokens/s\n", step, loss,
                 norm.item<double>(), rate, per_second);
    }
    if (options.validate_every > 0 && step % options.validate_every == 0 && step < options.steps) {
      say_validation(step);
    }
    if (checkpoint && !checkpoint->step(step)) return lockstep::kExitPreempted;
  }
  if (checkpoint) checkpoint->finish();
  say_validation(step);
  if (!options.out.empty()) save_model(options, *model, world.rank() == 0);
  return 0;
}

}  // namespace gpt2
