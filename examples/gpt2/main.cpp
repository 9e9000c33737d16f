// Trains a GPT-2 from text, on one rank or many, and lets it write.
//
//   gpt2 tokens docs/*.md --out data --vocabulary 1024
//   lockstep run -n 2 gpt2 train --data data --out model --layers 4 --heads 4 --width 128
//   gpt2 sample --model model --prompt "A rank"
//
// docs/gpt2.md says more.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "lockstep/cli_parse.hpp"
#include "lockstep/error.hpp"
#include "sampler.hpp"
#include "token_file.hpp"
#include "tokenizer.hpp"
#include "trainer.hpp"

namespace gpt2 {
namespace {

using lockstep::Code;
using lockstep::Error;

struct TokensOptions {
  std::vector<std::string> texts;
  std::string out;
  std::string tokenizer;
  int64_t vocabulary = 257;
  double held_out = 0.1;
};

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (file && !text.empty()) return text;
  throw Error(Code::kFileRead, fmt::format("{} cannot be read, or is empty", path),
              "give text files");
}

// Where the part of a text begins that is not trained on: at a line, if there is one.
size_t cut_at(const std::string& text, double held_out) {
  const auto wanted = static_cast<size_t>(static_cast<double>(text.size()) * (1 - held_out));
  const size_t line = text.find('\n', wanted);
  return line == std::string::npos ? wanted : line + 1;
}

// Texts -> train.bin, val.bin and the tokenizer's files. The end of each text is held out.
int make_tokens(const TokensOptions& options) {
  std::vector<std::string> trained, held_out;
  for (const auto& path : options.texts) {
    const std::string text = read_text(path);
    const size_t cut = cut_at(text, options.held_out);
    trained.push_back(text.substr(0, cut));
    held_out.push_back(text.substr(cut));
  }
  auto tokenizer = options.tokenizer.empty() ? Tokenizer::train(trained, options.vocabulary)
                                             : Tokenizer::load(options.tokenizer);
  std::filesystem::create_directories(options.out);
  tokenizer.save(options.out);
  for (const auto& [name, texts] : {std::pair{"train", &trained}, std::pair{"val", &held_out}}) {
    std::vector<int> tokens;
    size_t bytes = 0;
    for (const auto& text : *texts) {
      if (text.empty()) continue;
      bytes += text.size();
      const auto more = tokenizer.encode(text);
      tokens.insert(tokens.end(), more.begin(), more.end());
      if (tokenizer.end_of_text() >= 0) tokens.push_back(tokenizer.end_of_text());
    }
    write_tokens(fmt::format("{}/{}.bin", options.out, name), tokens);
    fmt::print("{}.bin: {} bytes, {} tokens of {}\n", name, bytes, tokens.size(), tokenizer.size());
  }
  return 0;
}

void add_tokens(CLI::App& app, TokensOptions& options) {
  app.add_option("texts", options.texts, "text files")->required();
  app.add_option("--out", options.out, "folder for train.bin, val.bin and the tokenizer")
      ->required();
  app.add_option("--tokenizer", options.tokenizer, "folder with vocab.json and merges.txt to use");
  app.add_option("--vocabulary", options.vocabulary,
                 "tokens to learn from the texts; 257: each byte is one")
      ->capture_default_str();
  app.add_option("--held-out", options.held_out, "share of each text for validation")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
}

void add_train(CLI::App& app, TrainOptions& options, std::string& model) {
  app.add_option("--data", options.data, "folder with train.bin and val.bin")->required();
  app.add_option("--init", options.init, "folder of a published GPT-2 to go on from");
  app.add_option("--out", options.out, "folder for the trained model, as Hugging Face has it");
  app.add_option("--checkpoint", options.checkpoint, "folder of checkpoints to save and resume");
  app.add_option("--save-every", options.save_every, "steps between checkpoints")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--model", model,
                 "gpt2, gpt2-medium, gpt2-large or gpt2-xl, before the sizes below");
  const auto size = [&](const char* flag, int64_t& value, const char* meaning) {
    app.add_option(flag, value, meaning)->check(CLI::PositiveNumber)->capture_default_str();
  };
  size("--layers", options.config.layers, "blocks");
  size("--heads", options.config.heads, "attention heads of a block");
  size("--width", options.config.width, "of the stream");
  size("--context", options.config.context, "positions of a row");
  size("--vocabulary", options.config.vocabulary,
       "tokens; those of the data's tokenizer if not given");
  app.add_option("--dropout", options.config.dropout)->check(CLI::Range(0.0, 0.99));
  size("--stages", options.layout.stages, "ranks of a pipeline");
  app.add_option("--micro-batches", options.layout.micro_batches,
                 "of a pipeline; two for each stage if not given");
  size("--tensor-parallel", options.layout.tensor_parallel, "ranks that share each matrix");
  app.add_flag("--sequence-parallel", options.layout.sequence_parallel,
               "tensor ranks share the sequence outside of matrices, too");
  app.add_option("--shard", options.layout.shard,
                 "what data ranks divide: 1 the optimizer's state, 2 and gradients, 3 and weights")
      ->check(CLI::Range(0, 3))
      ->capture_default_str();
  app.add_option("--virtual-shards", options.layout.virtual_shards,
                 "parts that every batch is cut into, whatever the number of data ranks: the "
                 "weights are the same bits then; 0: off")
      ->check(CLI::NonNegativeNumber)
      ->excludes("--micro-batches")
      ->capture_default_str();
  app.add_option("--steps", options.steps, "updates; 0: validate only")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  size("--batch", options.batch, "rows of an update, over all ranks");
  size("--accumulate", options.accumulate, "parts of an update, one after the other");
  app.add_option("--lr", options.lr)->capture_default_str();
  app.add_option("--min-lr", options.min_lr)->capture_default_str();
  app.add_option("--warmup", options.warmup, "steps until --lr is reached")->capture_default_str();
  app.add_option("--weight-decay", options.weight_decay)->capture_default_str();
  app.add_option("--max-norm", options.max_norm, "of the gradients")->capture_default_str();
  app.add_flag("--bf16", options.bf16, "matrix products in bfloat16");
  app.add_option("--seed", options.seed)->capture_default_str();
  size("--log-every", options.log_every, "steps");
  app.add_option("--validate-every", options.validate_every, "steps; 0: at the end only")
      ->capture_default_str();
  app.add_option("--validate-windows", options.validate_windows, "0: all")->capture_default_str();
}

void add_sample(CLI::App& app, SampleOptions& options) {
  app.add_option("--model", options.model, "folder that train wrote, or a published GPT-2")
      ->required();
  app.add_option("--tokenizer", options.tokens, "folder with vocab.json and merges.txt");
  app.add_option("--prompt", options.prompt, "the text's beginning");
  app.add_option("--count", options.count, "tokens to write")->capture_default_str();
  app.add_option("--temperature", options.temperature, "0: the likeliest token")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--top-k", options.top_k, "choose among so many; 0: all")->capture_default_str();
  app.add_option("--seed", options.seed)->capture_default_str();
}

// Sizes that were not given: those of --model, and the vocabulary of the data's tokenizer.
void complete(CLI::App& app, TrainOptions& options, const std::string& model) {
  const auto given = [&](const char* flag) { return app.get_option(flag)->count() > 0; };
  if (!model.empty()) {
    const Config named = named_config(model);
    if (!given("--layers")) options.config.layers = named.layers;
    if (!given("--heads")) options.config.heads = named.heads;
    if (!given("--width")) options.config.width = named.width;
  }
  if (!given("--vocabulary") && std::filesystem::exists(options.data + "/vocab.json")) {
    options.config.vocabulary = Tokenizer::load(options.data).size();
  }
}

int run(int argc, char** argv) {
  CLI::App app("Trains a GPT-2 from text, on one rank or many, and lets it write", "gpt2");
  app.footer(lockstep::format_examples(
      {{"gpt2 tokens docs/*.md --out data --vocabulary 1024", "text to tokens"},
       {"lockstep run -n 2 gpt2 train --data data --out model --layers 4 --heads 4 --width 128",
        "train on two ranks"},
       {"gpt2 sample --model model --prompt \"A rank\"", "write"}}));
  app.require_subcommand(1);
  TokensOptions tokens;
  TrainOptions training;
  SampleOptions sampling;
  std::string model;
  auto* tokens_command = app.add_subcommand("tokens", "Make token files from text");
  auto* train_command = app.add_subcommand("train", "Train a model");
  auto* sample_command = app.add_subcommand("sample", "Write text with a trained model");
  auto* logits_command = app.add_subcommand("logits", "Write a model's logits for a token file");
  std::string logits_model, logits_tokens, logits_out;
  logits_command->add_option("--model", logits_model, "folder of the model")->required();
  logits_command->add_option("--tokens", logits_tokens, "token file")->required();
  logits_command->add_option("--out", logits_out, "safetensors file")->required();
  add_tokens(*tokens_command, tokens);
  add_train(*train_command, training, model);
  add_sample(*sample_command, sampling);
  lockstep::parse_or_throw(app, argc, argv);
  if (tokens_command->parsed()) return make_tokens(tokens);
  if (sample_command->parsed()) return sample(sampling);
  if (logits_command->parsed()) return write_logits(logits_model, logits_tokens, logits_out);
  complete(*train_command, training, model);
  return train(training);
}

}  // namespace
}  // namespace gpt2

int main(int argc, char** argv) {
  return lockstep::run_program(gpt2::run, argc, argv);
}
