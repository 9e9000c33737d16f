#include <fmt/format.h>

#include <tuple>
#include <type_traits>
#include <utility>

#include "base/counted.hpp"
#include "base/mutation.hpp"
#include "device/parameter_notes.hpp"
#include "lockstep/error.hpp"
#include "lockstep/optim.hpp"
#include "torch_compat.hpp"
#include "train/checkpoint_parts.hpp"

// Optimizers in checkpoints: the state of each parameter, as tensors named like
// optimizer.state.layer.weight.exp_avg, and the options of each group.

namespace lockstep {
namespace {

using nlohmann::json;
namespace optim = torch::optim;

// For each kind of optimizer its types, and its fields under PyTorch's names.
struct SgdKind {
  static constexpr const char* kName = "SGD";
  using Optimizer = optim::SGD;
  using Options = optim::SGDOptions;
  using State = optim::SGDParamState;
  template <class Visit>
  static void visit(Options& options, const Visit& take) {
    take("lr", options.lr());
    take("momentum", options.momentum());
    take("dampening", options.dampening());
    take("weight_decay", options.weight_decay());
    take("nesterov", options.nesterov());
  }
  template <class Visit>
  static void visit(State& state, const Visit& take) {
    take("momentum_buffer", state.momentum_buffer());
  }
};

template <class AnyAdam, class AnyOptions, class AnyState>
struct AnyAdamKind {
  using Optimizer = AnyAdam;
  using Options = AnyOptions;
  using State = AnyState;
  template <class Visit>
  static void visit(Options& options, const Visit& take) {
    take("lr", options.lr());
    take("betas", options.betas());
    take("eps", options.eps());
    take("weight_decay", options.weight_decay());
    take("amsgrad", options.amsgrad());
  }
  template <class Visit>
  static void visit(State& state, const Visit& take) {
    take("step", state.step());
    take("exp_avg", state.exp_avg());
    take("exp_avg_sq", state.exp_avg_sq());
    take("max_exp_avg_sq", state.max_exp_avg_sq());
  }
};

struct PlainAdamKind : AnyAdamKind<optim::Adam, optim::AdamOptions, optim::AdamParamState> {
  static constexpr const char* kName = "Adam";
};
struct AdamWKind : AnyAdamKind<optim::AdamW, optim::AdamWOptions, optim::AdamWParamState> {
  static constexpr const char* kName = "AdamW";
};

struct AdagradKind {
  static constexpr const char* kName = "Adagrad";
  using Optimizer = optim::Adagrad;
  using Options = optim::AdagradOptions;
  using State = optim::AdagradParamState;
  template <class Visit>
  static void visit(Options& options, const Visit& take) {
    take("lr", options.lr());
    take("lr_decay", options.lr_decay());
    take("weight_decay", options.weight_decay());
    take("initial_accumulator_value", options.initial_accumulator_value());
    take("eps", options.eps());
  }
  template <class Visit>
  static void visit(State& state, const Visit& take) {
    take("step", state.step());
    take("sum", state.sum());
  }
};

struct RmspropKind {
  static constexpr const char* kName = "RMSprop";
  using Optimizer = optim::RMSprop;
  using Options = optim::RMSpropOptions;
  using State = optim::RMSpropParamState;
  template <class Visit>
  static void visit(Options& options, const Visit& take) {
    take("lr", options.lr());
    take("alpha", options.alpha());
    take("eps", options.eps());
    take("weight_decay", options.weight_decay());
    take("momentum", options.momentum());
    take("centered", options.centered());
  }
  template <class Visit>
  static void visit(State& state, const Visit& take) {
    take("step", state.step());
    take("square_avg", state.square_avg());
    take("momentum_buffer", state.momentum_buffer());
    take("grad_avg", state.grad_avg());
  }
};

using Betas = std::tuple<double, double>;

template <class Kind>
class OptimizerPart final : public CheckpointPart {
 public:
  OptimizerPart(std::string section, optim::Optimizer& optimizer, NamesOfParameters names)
      : section_(std::move(section)), optimizer_(optimizer), names_(std::move(names)) {}

  PartContents contents() override;
  std::function<void()> load(SectionSource& source) override;

  std::vector<torch::Tensor> needs_masters_of() const override {
    std::vector<torch::Tensor> needed;
    const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer_);
    for_each_parameter([&](const torch::Tensor& parameter) {
      if (fused != nullptr && fused->has_master(parameter)) needed.push_back(parameter);
    });
    return needed;
  }

 private:
  using State = typename Kind::State;
  using Options = typename Kind::Options;

  Options& options_of(optim::OptimizerParamGroup& group) const {
    return static_cast<Options&>(group.options());
  }
  State* state_of(const torch::Tensor& parameter) const {
    auto& states = optimizer_.state();
    const auto found = states.find(compat::optimizer_state_key(parameter.unsafeGetTensorImpl()));
    return found == states.end() ? nullptr : static_cast<State*>(found->second.get());
  }
  std::string prefix_of(const torch::Tensor& parameter) const;

  // Visits each parameter once. This rank may hold no part of a sharded parameter.
  template <class Visit>
  void for_each_parameter(const Visit& visit) const {
    std::set<const c10::TensorImpl*> seen;
    for (auto& group : optimizer_.param_groups()) {
      for (const torch::Tensor& parameter : group.params()) {
        const bool elsewhere =
            parameter.numel() == 0 && element_count(slice_of(parameter).whole) != 0;
        if (!elsewhere && seen.insert(parameter.unsafeGetTensorImpl()).second) visit(parameter);
      }
    }
  }

  // A state tensor of the parameter's shape is divided as the parameter is.
  static Slice slice_of_state(const torch::Tensor& parameter, const torch::Tensor& state) {
    return state.sizes() == parameter.sizes() ? slice_of(parameter)
                                              : whole_slice(state.sizes().vec());
  }

  std::string section_;
  optim::Optimizer& optimizer_;
  NamesOfParameters names_;
};

template <class Kind>
std::string OptimizerPart<Kind>::prefix_of(const torch::Tensor& parameter) const {
  const auto found = names_.find(parameter.unsafeGetTensorImpl());
  if (found == names_.end()) {
    throw Error(
        Code::kUsage, fmt::format("{} updates a parameter that its module does not have", section_),
        "add the optimizer with the module, or the pipeline, whose parameters it was given");
  }
  return fmt::format("{}.state.{}.", section_, found->second);
}

template <class Kind>
PartContents OptimizerPart<Kind>::contents() {
  if (auto* fused = dynamic_cast<FusedOptimizer*>(&optimizer_)) fused->collect_state();
  PartContents contents;
  contents.value = {{"kind", Kind::kName}, {"groups", json::array()}};
  for (auto& group : optimizer_.param_groups()) {
    json options;
    Kind::visit(options_of(group), [&](const char* name, const auto& value) {
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, Betas>) {
        options[name] = {std::get<0>(value), std::get<1>(value)};
      } else {
        options[name] = value;
      }
    });
    contents.value["groups"].push_back(std::move(options));
  }
  for_each_parameter([&](const torch::Tensor& parameter) {
    const std::string prefix = prefix_of(parameter);
    State* state = state_of(parameter);
    if (state == nullptr) return;
    Kind::visit(*state, [&](const char* name, auto& value) {
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, torch::Tensor>) {
        if (!value.defined()) return;
        contents.items.push_back({prefix + name, value, slice_of_state(parameter, value)});
      } else {
        contents.items.push_back(
            {prefix + name, torch::full({}, value, torch::kInt64), whole_slice({})});
      }
    });
  });
  return contents;
}

template <class Kind>
std::function<void()> OptimizerPart<Kind>::load(SectionSource& source) {
  constexpr const char* kHelp =
      "resume with the optimizer that was saved, with its parameters in the same groups";
  const json value = source.value();
  if (!value.is_object()) source.fail("the checkpoint does not have it", kHelp);
  const auto kind = value.value("kind", std::string("of no known kind"));
  if (kind != Kind::kName) {
    source.fail(fmt::format("its optimizer is {}, and this run's is {}", kind, Kind::kName), kHelp);
  }
  const json groups = value.at("groups");
  auto& ours = optimizer_.param_groups();
  if (groups.size() != ours.size()) {
    source.fail(fmt::format("its optimizer has {}, and this run's has {}",
                            counted(groups.size(), "group"), ours.size()),
                kHelp);
  }
  std::vector<Options> options;
  for (size_t i = 0; i < ours.size(); ++i) {
    options.push_back(options_of(ours[i]));
    Kind::visit(options.back(), [&](const char* name, auto& field) {
      if constexpr (std::is_same_v<std::decay_t<decltype(field)>, Betas>) {
        field = Betas(groups[i].at(name).at(0).template get<double>(),
                      groups[i].at(name).at(1).template get<double>());
      } else {
        groups[i].at(name).get_to(field);
      }
    });
  }
  struct Loaded {
    torch::Tensor parameter;
    std::shared_ptr<State> state;  // null: it had none yet
  };
  std::vector<Loaded> states;
  for_each_parameter([&](const torch::Tensor& parameter) {
    const std::string prefix = prefix_of(parameter);
    auto state = std::make_shared<State>();
    bool any = false;
    Kind::visit(*state, [&](const char* name, auto& field) {
      if (!source.has(prefix + name)) return;
      any = true;
      if constexpr (std::is_same_v<std::decay_t<decltype(field)>, torch::Tensor>) {
        const Slice slice = slice_of(parameter);
        const auto dtype = source.dtype_of(prefix + name);
        field = source.read(prefix + name, slice, dtype);
      } else {
        field = source.read(prefix + name, whole_slice({}), torch::kInt64).template item<int64_t>();
      }
    });
    states.push_back({parameter, any ? std::move(state) : nullptr});
  });
  return [this, options = std::move(options), states = std::move(states)] {
    for (size_t i = 0; i < options.size(); ++i) {
      options_of(optimizer_.param_groups()[i]) = options[i];
    }
    if (is_planted(Mutation::kStateNotRestored)) return;
    for (const auto& each : states) {
      const auto key = compat::optimizer_state_key(each.parameter.unsafeGetTensorImpl());
      optimizer_.state().erase(key);
      if (each.state == nullptr) continue;
      auto state = std::make_unique<State>(*each.state);
      Kind::visit(*state, [&](const char*, auto& field) {
        if constexpr (std::is_same_v<std::decay_t<decltype(field)>, torch::Tensor>) {
          if (field.defined()) field = field.to(each.parameter.device());
        }
      });
      optimizer_.state()[key] = std::move(state);
    }
    if (auto* fused = dynamic_cast<FusedOptimizer*>(&optimizer_)) fused->note_loaded_state();
  };
}

template <class Kind>
bool make_if(const std::string& section, optim::Optimizer& optimizer, NamesOfParameters& names,
             std::unique_ptr<CheckpointPart>& made) {
  if (dynamic_cast<typename Kind::Optimizer*>(&optimizer) == nullptr) return false;
  made = std::make_unique<OptimizerPart<Kind>>(section, optimizer, std::move(names));
  return true;
}

}  // namespace

std::unique_ptr<CheckpointPart> optimizer_part(const std::string& section,
                                               torch::optim::Optimizer& optimizer,
                                               NamesOfParameters names) {
  std::unique_ptr<CheckpointPart> made;
  if (make_if<SgdKind>(section, optimizer, names, made) ||
      make_if<PlainAdamKind>(section, optimizer, names, made) ||
      make_if<AdamWKind>(section, optimizer, names, made) ||
      make_if<AdagradKind>(section, optimizer, names, made) ||
      make_if<RmspropKind>(section, optimizer, names, made)) {
    return made;
  }
  throw Error(
      Code::kUsage, fmt::format("{}: a checkpoint does not know this kind of optimizer", section),
      "use SGD, Adam, AdamW, Adagrad or RMSprop; or add functions that save and load yours");
}

}  // namespace lockstep
