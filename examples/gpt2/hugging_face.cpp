#include "hugging_face.hpp"

#include <fmt/format.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

namespace gpt2 {
namespace {

using lockstep::Code;
using lockstep::Error;

struct Name {
  const char* ours;
  const char* published;
  bool transposed;
};

// Of one block, without "0." and "h.0.".
constexpr Name kBlockNames[] = {
    {"ln1.weight", "ln_1.weight", false},        {"ln1.bias", "ln_1.bias", false},
    {"qkv.weight", "attn.c_attn.weight", true},  {"qkv.bias", "attn.c_attn.bias", false},
    {"proj.weight", "attn.c_proj.weight", true}, {"proj.bias", "attn.c_proj.bias", false},
    {"ln2.weight", "ln_2.weight", false},        {"ln2.bias", "ln_2.bias", false},
    {"fc.weight", "mlp.c_fc.weight", true},      {"fc.bias", "mlp.c_fc.bias", false},
    {"out.weight", "mlp.c_proj.weight", true},   {"out.bias", "mlp.c_proj.bias", false}};

constexpr Name kOtherNames[] = {{"input.wte.weight", "wte.weight", false},
                                {"input.wpe", "wpe.weight", false},
                                {"output.ln_f.weight", "ln_f.weight", false},
                                {"output.ln_f.bias", "ln_f.bias", false}};

struct Pair {
  std::string ours, published;
  bool transposed;
};

std::vector<Pair> names_of(const Config& config) {
  std::vector<Pair> names;
  for (const auto& each : kOtherNames) names.push_back({each.ours, each.published, false});
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const auto& each : kBlockNames) {
      names.push_back({fmt::format("{}.{}", layer, each.ours),
                       fmt::format("h.{}.{}", layer, each.published), each.transposed});
    }
  }
  return names;
}

Config read_config(const std::string& path) {
  std::ifstream file(path);
  const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("n_layer") || !json.contains("n_head") ||
      !json.contains("n_embd") || !json.contains("vocab_size")) {
    throw Error(Code::kFileFormat,
                fmt::format("{} has no n_layer, n_head, n_embd and vocab_size", path),
                "give a folder of GPT-2 as Hugging Face's transformers writes it");
  }
  Config config;
  config.layers = json["n_layer"];
  config.heads = json["n_head"];
  config.width = json["n_embd"];
  config.vocabulary = json["vocab_size"];
  config.context = json.value("n_positions", json.value("n_ctx", int64_t{1024}));
  const std::string activation = json.value("activation_function", "gelu_new");
  const bool usual =
      activation == "gelu_new" && json.value("n_inner", nlohmann::json()).is_null() &&
      json.value("layer_norm_epsilon", 1e-5) == 1e-5 && json.value("tie_word_embeddings", true);
  if (usual) return config;
  throw Error(Code::kFileFormat, fmt::format("{} describes a variant of GPT-2", path),
              "give one with gelu_new, an MLP of four times the width, an epsilon of 1e-5 and tied "
              "embeddings");
}

}  // namespace

PublishedModel read_published(const std::string& folder) {
  PublishedModel model;
  model.config = read_config(folder + "/config.json");
  const std::string path = folder + "/model.safetensors";
  const auto given = lockstep::load_tensors(path);
  const std::string prefix = given.contains("transformer.wte.weight") ? "transformer." : "";
  const auto find = [&](const std::string& name) -> const torch::Tensor& {
    const auto found = given.find(prefix + name);
    if (found != given.end()) return found->second;
    throw Error(Code::kFileFormat, fmt::format("{} has no tensor {}", path, prefix + name),
                "give the weights of a GPT-2 with the sizes in config.json");
  };
  for (const auto& [ours, published, transposed] : names_of(model.config)) {
    const auto tensor = find(published).to(torch::kFloat32);
    model.weights[ours] = transposed ? tensor.t().contiguous() : tensor;
  }
  const auto head = given.find("lm_head.weight");
  if (head != given.end() && !torch::equal(head->second, find("wte.weight"))) {
    throw Error(Code::kFileFormat,
                fmt::format("{} has an lm_head.weight that is not wte.weight", path),
                "give a model with tied embeddings");
  }
  return model;
}

void write_published(const std::string& folder, const Config& config,
                     const lockstep::TensorMap& weights) {
  lockstep::TensorMap published;
  for (const auto& [ours, name, transposed] : names_of(config)) {
    const auto& tensor = weights.at(ours);
    published[name] = transposed ? tensor.t().contiguous() : tensor;
  }
  lockstep::save_tensors(folder + "/model.safetensors", published, {{"format", "pt"}});
  const nlohmann::ordered_json json = {{"model_type", "gpt2"},
                                       {"architectures", {"GPT2LMHeadModel"}},
                                       {"n_layer", config.layers},
                                       {"n_head", config.heads},
                                       {"n_embd", config.width},
                                       {"n_positions", config.context},
                                       {"n_ctx", config.context},
                                       {"vocab_size", config.vocabulary},
                                       {"activation_function", "gelu_new"},
                                       {"layer_norm_epsilon", 1e-5},
                                       {"tie_word_embeddings", true}};
  std::ofstream file(folder + "/config.json");
  file << json.dump(2) << "\n";
  file.close();
  if (!file) {
    throw Error(Code::kFileWrite, fmt::format("{}/config.json cannot be written", folder),
                "give a folder that can be written to");
  }
}

}  // namespace gpt2
