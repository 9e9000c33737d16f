#include "train/checkpoint_parts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <mutex>
#include <string_view>
#include <utility>

#include "base/counted.hpp"
#include "base/process.hpp"
#include "device/dtype_map.hpp"
#include "device/parameter_notes.hpp"
#include "device/rng.hpp"
#include "lockstep/error.hpp"
#include "lockstep/tensor_text.hpp"
#include "precision/loss_scale.hpp"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr const char* kSameModelHelp =
    "resume with the program and the options that saved it, or save to another folder";

std::vector<PartContents::Item> items_of(const torch::nn::Module& module) {
  require_not_sharded(module, "Checkpoint::add()", "add the FullyShardedDataParallel instead");
  std::vector<PartContents::Item> items;
  for (const auto& item : module.named_parameters()) {
    items.push_back({item.key(), item.value(), slice_of(item.value()), true});
  }
  for (const auto& item : module.named_buffers()) {
    items.push_back({item.key(), item.value(), slice_of(item.value())});
  }
  return items;
}

// A shard may be empty: then other ranks have the parameter. Inside GatheredParameters shards do
// not have what was written to the whole parameters, and what is loaded into them would be lost.
std::vector<PartContents::Item> items_of(const ShardedModel& model) {
  std::vector<PartContents::Item> items;
  for (const auto& item : model.module()->named_parameters()) {
    const torch::Tensor shard = model.shard_of(item.value());
    if (!shard.is_same(item.value()) && !is_sharded(item.value())) {
      throw Error(Code::kUsage, "a checkpoint of a sharded model inside GatheredParameters",
                  "save and resume before the guard begins or after it ends");
    }
    if (shard.numel() > 0) items.push_back({item.key(), shard, slice_of(shard)});
  }
  for (const auto& item : model.module()->named_buffers()) {
    items.push_back({item.key(), item.value(), slice_of(item.value())});
  }
  return items;
}

// Reads a tensor for each item; the function returned copies them there.
std::function<void()> load_items(SectionSource& source, std::vector<PartContents::Item> items) {
  std::vector<torch::Tensor> loaded;
  for (const auto& item : items) {
    loaded.push_back(source.read(item.name, item.slice, item.tensor.scalar_type()));
  }
  return [items = std::move(items), loaded = std::move(loaded)] {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < items.size(); ++i) torch::Tensor(items[i].tensor).copy_(loaded[i]);
  };
}

class ModulePart final : public CheckpointPart {
 public:
  explicit ModulePart(torch::nn::Module& module) : module_(module) {}
  PartContents contents() override { return {items(), {}}; }
  std::vector<PartContents::Item> items() const override { return items_of(module_); }
  std::function<void()> load(SectionSource& source) override { return load_items(source, items()); }

 private:
  torch::nn::Module& module_;
};

class PipelinePart final : public CheckpointPart {
 public:
  explicit PipelinePart(Pipeline& pipeline) : pipeline_(pipeline) {}
  PartContents contents() override { return {items(), {}}; }
  std::vector<PartContents::Item> items() const override {
    std::vector<PartContents::Item> all;
    for (const int stage : pipeline_.local_stages()) {
      const ShardedModel* model = pipeline_.sharded(stage);
      for (auto& item : model ? items_of(*model) : items_of(*pipeline_.stage(stage))) {
        all.push_back(std::move(item));
      }
    }
    return all;
  }
  std::function<void()> load(SectionSource& source) override {
    return [this, load = load_items(source, items())] {
      for (const ShardedModel* each : sharded()) each->begin_change();
      load();
      for (ShardedModel* each : sharded()) each->note_changed_shards();
    };
  }
  std::vector<StageTensor> stage_tensors() const override {
    std::vector<StageTensor> all;
    for (const int stage : pipeline_.local_stages()) {
      const auto& module = *pipeline_.stage(stage);
      for (const auto& item : module.named_parameters()) all.push_back({stage, item.key()});
      for (const auto& item : module.named_buffers()) all.push_back({stage, item.key()});
    }
    return all;
  }

 private:
  std::vector<ShardedModel*> sharded() const {
    std::vector<ShardedModel*> models;
    for (const int stage : pipeline_.local_stages()) {
      if (ShardedModel* model = pipeline_.sharded(stage)) models.push_back(model);
    }
    return models;
  }

  Pipeline& pipeline_;
};

class ShardedPart final : public CheckpointPart {
 public:
  explicit ShardedPart(ShardedModel& model) : model_(model) {}
  PartContents contents() override { return {items(), {}}; }
  std::vector<PartContents::Item> items() const override { return items_of(model_); }
  std::function<void()> load(SectionSource& source) override {
    return [this, load = load_items(source, items())] {
      model_.begin_change();
      load();
      model_.note_changed_shards();
    };
  }

 private:
  ShardedModel& model_;
};

// Parameters, or shards of them, under their names.
using NamedParameters = std::vector<std::pair<std::string, torch::Tensor>>;

class MastersPart final : public CheckpointPart {
 public:
  MastersPart(MasterWeights masters, std::function<NamedParameters()> parameters)
      : masters_(std::move(masters)), parameters_(std::move(parameters)) {}

  bool saves_master_of(const torch::Tensor& parameter) const override {
    return masters_.holds(parameter);
  }

  PartContents contents() override {
    PartContents contents;
    for (const auto& [name, parameter] : parameters_()) {
      if (!masters_.holds(parameter)) continue;
      contents.items.push_back({name, masters_.of(parameter), slice_of(parameter)});
    }
    return contents;
  }

  std::function<void()> load(SectionSource& source) override {
    std::vector<std::pair<torch::Tensor, torch::Tensor>> loaded;  // parameter, master
    for (const auto& [name, parameter] : parameters_()) {
      if (!masters_.holds(parameter)) continue;
      loaded.emplace_back(parameter, source.read(name, slice_of(parameter), torch::kFloat32));
    }
    return [masters = masters_, loaded = std::move(loaded)] {
      const torch::NoGradGuard no_grad;
      for (const auto& [parameter, master] : loaded) {
        masters.of(parameter).copy_(master);
        masters.round(parameter);
      }
    };
  }

 private:
  MasterWeights masters_;
  std::function<NamedParameters()> parameters_;
};

class AveragePart final : public CheckpointPart {
 public:
  explicit AveragePart(WeightAverage& average) : average_(average) {}

  PartContents contents() override { return {items(), {{"updates", average_.updates()}}}; }

  std::vector<PartContents::Item> items() const override {
    std::vector<PartContents::Item> items;
    for (const auto& entry : average_.entries()) {
      const Slice slice = slice_of(entry.of);
      const bool elsewhere = entry.of.numel() == 0 && element_count(slice.whole) != 0;
      if (!elsewhere) items.push_back({entry.name, entry.average, slice});
    }
    return items;
  }

  std::function<void()> load(SectionSource& source) override {
    const json value = source.value();
    if (!value.is_object() || !value.contains("updates") || !value["updates"].is_number_integer()) {
      source.fail("it does not tell the number of updates", kSameModelHelp);
    }
    const auto updates = value["updates"].get<int64_t>();
    return [this, updates, copy = load_items(source, items())] {
      copy();
      average_.set_updates(updates);
    };
  }

 private:
  WeightAverage& average_;
};

class TensorPart final : public CheckpointPart {
 public:
  TensorPart(std::string section, torch::Tensor& tensor)
      : section_(std::move(section)), tensor_(tensor) {}

  PartContents contents() override {
    if (!tensor_.defined()) return {{}, json::object()};
    return {items(), {}};
  }

  std::vector<PartContents::Item> items() const override {
    if (!tensor_.defined()) return {};
    return {{section_, tensor_, slice_of(tensor_)}};
  }

  std::function<void()> load(SectionSource& source) override {
    if (tensor_.defined()) return load_items(source, items());
    if (!source.has(section_)) return [] {};
    return [this, loaded = source.read_whole(section_)] { tensor_ = loaded; };
  }

 private:
  std::string section_;
  torch::Tensor& tensor_;
};

// A value without tensors. `load` checks it and returns what takes it over.
class ValuePart final : public CheckpointPart {
 public:
  using Load = std::function<std::function<void()>(const SectionSource&, const json&)>;
  ValuePart(std::function<json()> save, Load load)
      : save_(std::move(save)), load_(std::move(load)) {}

  PartContents contents() override { return {{}, save_()}; }

  std::function<void()> load(SectionSource& source) override {
    const json value = source.value();
    if (value.is_null()) source.fail("the checkpoint does not have it", kSameModelHelp);
    try {
      return load_(source, value);
    } catch (const json::exception&) {
      source.fail("its value is of another kind", kSameModelHelp);
    }
  }

 private:
  std::function<json()> save_;
  Load load_;
};

// Reaches the count of steps, which libtorch keeps from everybody but schedulers.
struct SchedulerSteps : torch::optim::LRScheduler {
  static unsigned& of(torch::optim::LRScheduler& scheduler) {
    return scheduler.*(&SchedulerSteps::step_count_);
  }
};

void require_same(const SectionSource& source, const json& stored, const json& ours,
                  const char* field) {
  if (stored.at(field) == ours.at(field)) return;
  source.fail(fmt::format("it has {} {}, and this run has {}", field, stored.at(field).dump(),
                          ours.at(field).dump()),
              kSameModelHelp);
}

// JSON has no such numbers.
json number_or_text(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

double number_from(const json& value) {
  if (!value.is_string()) return value.get<double>();
  const auto text = value.get<std::string>();
  const double infinity = std::numeric_limits<double>::infinity();
  return text == "inf" ? infinity : text == "-inf" ? -infinity : std::nan("");
}

constexpr const char* kNumberKey = "lockstep:number";

json decode_numbers(const json& stored) {
  if (stored.is_object() && stored.size() == 1 && stored.contains(kNumberKey)) {
    return number_from(stored[kNumberKey]);
  }
  json value = stored;
  if (value.is_structured()) {
    for (auto& each : value) each = decode_numbers(each);
  }
  return value;
}

torch::Tensor state_of_generator(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

class RandomPart final : public CheckpointPart {
 public:
  RandomPart(const RandomStreams& streams, int rank)
      : streams_(streams), rank_(rank), prefix_(fmt::format("rank{}.", rank)) {}

  PartContents contents() override {
    PartContents contents;
    contents.value = positions();
    for (const auto& [name, generator] : generators_of_thread(streams_.gpus)) {
      const auto state = state_of_generator(generator);
      contents.items.push_back({prefix_ + name, state, whole_slice(state.sizes().vec())});
    }
    return contents;
  }

  std::function<void()> load(SectionSource& source) override {
    if (!source.same_ranks() || source.value().is_null()) return [] {};
    const json stored = fitting_positions(source);
    std::vector<std::pair<at::Generator, torch::Tensor>> states;
    for (const auto& [name, generator] : fitting_generators(source)) {
      const auto state = source.read_whole(name);
      if (state.numel() != state_of_generator(generator).numel()) {
        source.fail(fmt::format("the state of generator {} is of another libtorch", name),
                    "resume with the libtorch that saved it");
      }
      states.emplace_back(generator, state);
    }
    return [this, states = std::move(states), stored] {
      for (auto [generator, state] : states) {
        const std::lock_guard lock(generator.mutex());
        generator.set_state(state);
      }
      put_positions(stored);  // they refer to the generator
    };
  }

 private:
  json positions() const {
    json devices = json::array();
    json pipelines = json::array();
    for (const auto& each : streams_.devices) {
      for (size_t i = 0; i < each.size(); ++i) devices.push_back(each[i].random_position());
    }
    for (const Pipeline* each : streams_.pipelines) pipelines.push_back(each->random_position());
    return {{"devices", devices}, {"pipelines", pipelines}};
  }

  // Another number of GPUs, devices or pipelines divides the work differently: their numbers start
  // anew.
  bool fits(const SectionSource& source, const char* kind, size_t stored, size_t ours) const {
    if (stored != ours && rank_ == 0) {
      print_error(
          fmt::format("lockstep: {} has random numbers of {} {}, and this run has {}: they "
                      "start anew\n",
                      source.path(), stored, kind, ours));
    }
    return stored == ours;
  }

  // Stored names, and the generators that go on from there.
  std::map<std::string, at::Generator> fitting_generators(const SectionSource& source) const {
    const auto ours = generators_of_thread(streams_.gpus);
    const auto names = source.names_with(prefix_);
    std::map<std::string, at::Generator> fitting;
    if (source.has(prefix_ + "cpu")) fitting.emplace(prefix_ + "cpu", ours.at("cpu"));
    const auto stored = gpu_generators(names);
    if (!fits(source, "GPUs", stored.size(), streams_.gpus.size())) return fitting;
    for (size_t i = 0; i < stored.size(); ++i) {
      fitting.emplace(stored[i], ours.at(fmt::format("cuda:{}", i)));
    }
    return fitting;
  }

  json fitting_positions(const SectionSource& source) const {
    json stored = source.value();
    const json ours = positions();
    for (const char* kind : {"devices", "pipelines"}) {
      const size_t count = stored.contains(kind) ? stored[kind].size() : 0;
      if (!fits(source, kind, count, ours[kind].size())) stored[kind] = nullptr;
    }
    return stored;
  }

  void put_positions(const json& stored) const {
    size_t next = 0;
    for (const auto& each : streams_.devices) {
      for (size_t i = 0; i < each.size() && !stored["devices"].is_null(); ++i) {
        each[i].set_random_position(stored["devices"][next++].get<int64_t>());
      }
    }
    next = 0;
    for (Pipeline* each : streams_.pipelines) {
      if (stored["pipelines"].is_null()) break;
      each->set_random_position(stored["pipelines"][next++].get<int64_t>());
    }
  }

  const RandomStreams& streams_;
  int rank_;
  std::string prefix_;
};

}  // namespace

json encode_numbers(const json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    return {{kNumberKey, number_or_text(value.get<double>())}};
  }
  json stored = value;
  if (stored.is_structured()) {
    for (auto& each : stored) each = encode_numbers(each);
  }
  return stored;
}

SectionSource::SectionSource(const CheckpointReader& reader, std::string section, int rank,
                             int ranks)
    : reader_(reader),
      section_(std::move(section)),
      rank_(rank),
      same_ranks_(reader.manifest().ranks == ranks) {}

json SectionSource::value() const {
  const auto& values = reader_.manifest().values;
  if (!values.contains(section_)) return nullptr;
  const json& stored = values.at(section_);
  if (stored.contains("all")) return decode_numbers(stored["all"]);
  return decode_numbers(stored["ranks"].at(same_ranks_ ? static_cast<size_t>(rank_) : 0));
}

bool SectionSource::has(const std::string& name) const {
  return reader_.manifest().find(section_, name) != nullptr;
}

std::vector<std::string> SectionSource::names_with(const std::string& prefix) const {
  std::vector<std::string> names;
  for (const auto& tensor : reader_.manifest().tensors) {
    if (tensor.section == section_ && tensor.name.starts_with(prefix)) names.push_back(tensor.name);
  }
  return names;
}

void SectionSource::fail(const std::string& reason, const std::string& help) const {
  throw Error(Code::kTensorMismatch,
              fmt::format("{} of {} does not fit: {}", section_, reader_.path(), reason), help);
}

const StoredTensor& SectionSource::find(const std::string& name) const {
  const StoredTensor* tensor = reader_.manifest().find(section_, name);
  if (tensor == nullptr) fail(fmt::format("it has no tensor {}", name), kSameModelHelp);
  return *tensor;
}

torch::ScalarType SectionSource::dtype_of(const std::string& name) const {
  return scalar_type_of(find(name).dtype);
}

torch::Tensor SectionSource::read(const std::string& name, const Slice& slice,
                                  torch::ScalarType dtype) {
  const StoredTensor& stored = find(name);
  const auto stored_dtype = scalar_type_of(stored.dtype);
  if (stored.shape() != slice.whole || stored_dtype != dtype) {
    fail(fmt::format("its tensor {} is {} {}, and this run's is {} {}", name,
                     dtype_text(stored_dtype), shape_text(stored.shape()), dtype_text(dtype),
                     shape_text(slice.whole)),
         kSameModelHelp);
  }
  const auto tensor = torch::empty(slice.local, dtype);
  reader_.read(stored, slice,
               {static_cast<std::byte*>(tensor.data_ptr()), static_cast<size_t>(tensor.nbytes())});
  used_.insert(name);
  return tensor;
}

torch::Tensor SectionSource::read_whole(const std::string& name) {
  const StoredTensor& stored = find(name);
  return read(name, whole_slice(stored.shape()), scalar_type_of(stored.dtype));
}

NamesOfParameters names_of(const torch::nn::Module& module) {
  NamesOfParameters names;
  for (const auto& item : module.named_parameters()) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  return names;
}

NamesOfParameters names_of(const Pipeline& pipeline) {
  NamesOfParameters names;
  for (const int stage : pipeline.local_stages()) {
    const ShardedModel* model = pipeline.sharded(stage);
    names.merge(model ? names_of(*model) : names_of(*pipeline.stage(stage)));
  }
  return names;
}

std::unique_ptr<CheckpointPart> module_part(torch::nn::Module& module) {
  return std::make_unique<ModulePart>(module);
}

std::unique_ptr<CheckpointPart> pipeline_part(Pipeline& pipeline) {
  return std::make_unique<PipelinePart>(pipeline);
}

NamesOfParameters names_of(const ShardedModel& model) {
  NamesOfParameters names;
  for (const auto& [name, shard] : model.named_shards()) {
    names.emplace(shard.unsafeGetTensorImpl(), name);
  }
  return names;
}

std::unique_ptr<CheckpointPart> sharded_part(ShardedModel& model) {
  return std::make_unique<ShardedPart>(model);
}

std::unique_ptr<CheckpointPart> masters_part(const MasterWeights& masters,
                                             const torch::nn::Module& module) {
  return std::make_unique<MastersPart>(masters, [&module] {
    require_not_sharded(module, "Checkpoint::add()", "add the masters with the sharded model");
    NamedParameters parameters;
    for (const auto& item : module.named_parameters()) {
      parameters.emplace_back(item.key(), item.value());
    }
    return parameters;
  });
}

std::unique_ptr<CheckpointPart> masters_part(const MasterWeights& masters,
                                             const ShardedModel& model) {
  return std::make_unique<MastersPart>(masters, [&model] {
    NamedParameters parameters;
    for (const auto& item : model.module()->named_parameters()) {
      const torch::Tensor shard = model.shard_of(item.value());
      if (shard.numel() > 0) parameters.emplace_back(item.key(), shard);
    }
    return parameters;
  });
}

std::unique_ptr<CheckpointPart> tensor_part(const std::string& section, torch::Tensor& tensor) {
  return std::make_unique<TensorPart>(section, tensor);
}

std::unique_ptr<CheckpointPart> value_part(int64_t& value) {
  return std::make_unique<ValuePart>(
      [&value] { return json(value); },
      [&value](const SectionSource& source, const json& saved) -> std::function<void()> {
        if (!saved.is_number_integer()) source.fail("it is not a whole number", kSameModelHelp);
        return [&value, taken = saved.get<int64_t>()] { value = taken; };
      });
}

std::unique_ptr<CheckpointPart> value_part(double& value) {
  return std::make_unique<ValuePart>([&value] { return number_or_text(value); },
                                     [&value](const SectionSource&, const json& saved) {
                                       return
                                           [&value, taken = number_from(saved)] { value = taken; };
                                     });
}

std::unique_ptr<CheckpointPart> value_part(std::string& value) {
  return std::make_unique<ValuePart>([&value] { return json(value); },
                                     [&value](const SectionSource&, const json& saved) {
                                       return [&value, taken = saved.get<std::string>()] {
                                         value = taken;
                                       };
                                     });
}

std::unique_ptr<CheckpointPart> value_part(json& value) {
  return value_part([&value] { return value; }, [&value](const json& saved) { value = saved; });
}

std::unique_ptr<CheckpointPart> value_part(std::function<json()> save,
                                           std::function<void(const json&)> load) {
  return std::make_unique<ValuePart>(
      std::move(save), [load = std::move(load)](const SectionSource&, const json& saved) {
        return [load, saved] { load(saved); };
      });
}

std::unique_ptr<CheckpointPart> scaler_part(GradScaler& scaler) {
  const auto save = [&scaler]() -> json {
    const auto state = scaler.state_dict();
    if (!state) return {{"enabled", false}};
    if (state->scale <= 0) {
      throw Error(
          Code::kUsage, "the GradScaler's scale has shrunk to 0: every step overflows",
          "look for the loss or the gradient that is not finite, and resume from an earlier "
          "checkpoint");
    }
    return {{"enabled", true},
            {"scale", state->scale},
            {"growth_factor", state->growth_factor},
            {"backoff_factor", state->backoff_factor},
            {"growth_interval", state->growth_interval},
            {"_growth_tracker", state->growth_tracker}};
  };
  const auto load = [&scaler](const SectionSource& source,
                              const json& value) -> std::function<void()> {
    if (value.at("enabled").get<bool>() != scaler.is_enabled()) {
      source.fail(fmt::format("its scaler is {}, and this run's is not",
                              scaler.is_enabled() ? "disabled" : "enabled"),
                  kSameModelHelp);
    }
    if (!scaler.is_enabled()) return [] {};
    const GradScalerState state{
        value.at("scale").get<double>(), value.at("growth_factor").get<double>(),
        value.at("backoff_factor").get<double>(), value.at("growth_interval").get<int64_t>(),
        value.at("_growth_tracker").get<int64_t>()};
    require_usable(state);
    return [&scaler, state] { scaler.load_state_dict(state); };
  };
  return std::make_unique<ValuePart>(save, load);
}

std::unique_ptr<CheckpointPart> average_part(WeightAverage& average) {
  return std::make_unique<AveragePart>(average);
}

std::unique_ptr<CheckpointPart> scheduler_part(LrScheduler& scheduler) {
  const auto save = [&scheduler]() -> json {
    return {{"updates", scheduler.state().updates}, {"base_lrs", scheduler.state().base_lrs}};
  };
  const auto load = [&scheduler](const SectionSource& source,
                                 const json& value) -> std::function<void()> {
    const LrScheduler::State state{value.at("updates").get<int64_t>(),
                                   value.at("base_lrs").get<std::vector<double>>()};
    const size_t groups = scheduler.state().base_lrs.size();
    if (state.base_lrs.size() != groups) {
      source.fail(fmt::format("it has rates of {}, and this run's optimizer has {}",
                              counted(state.base_lrs.size(), "group"), groups),
                  kSameModelHelp);
    }
    return [&scheduler, state] { scheduler.load(state); };
  };
  return std::make_unique<ValuePart>(save, load);
}

std::unique_ptr<CheckpointPart> scheduler_part(torch::optim::LRScheduler& scheduler) {
  const auto save = [&scheduler]() -> json { return {{"steps", SchedulerSteps::of(scheduler)}}; };
  const auto load = [&scheduler](const SectionSource&, const json& value) -> std::function<void()> {
    const auto steps = value.at("steps").get<unsigned>();
    return [&scheduler, steps] { SchedulerSteps::of(scheduler) = steps; };
  };
  return std::make_unique<ValuePart>(save, load);
}

std::unique_ptr<CheckpointPart> sampler_part(DistributedSampler& sampler) {
  // Rows that all ranks together have had, so that other numbers of ranks go on from there too.
  const auto save = [&sampler]() -> json {
    return {{"rows", sampler.rows()},
            {"seed", sampler.options().seed},
            {"shuffle", sampler.options().shuffle},
            {"epoch", sampler.epoch()},
            {"rows_done", sampler.position() * sampler.ranks()}};
  };
  const auto load = [&sampler, save](const SectionSource& source,
                                     const json& value) -> std::function<void()> {
    for (const char* field : {"rows", "seed", "shuffle"}) {
      require_same(source, value, save(), field);
    }
    const auto epoch = value.at("epoch").get<int64_t>();
    const int64_t done = value.at("rows_done").get<int64_t>() / sampler.ranks();
    return [&sampler, epoch, done] {
      sampler.seek(epoch, std::clamp<int64_t>(done, 0, sampler.size()));
    };
  };
  return std::make_unique<ValuePart>(save, load);
}

std::unique_ptr<CheckpointPart> random_part(const RandomStreams& streams, int rank) {
  return std::make_unique<RandomPart>(streams, rank);
}

std::vector<std::string> gpu_generators(const std::vector<std::string>& names) {
  constexpr std::string_view kGpu = ".cuda:";
  std::map<int, std::string> by_number;
  for (const auto& name : names) {
    const size_t at = name.find(kGpu);
    if (at == std::string::npos) continue;
    int number = 0;
    std::from_chars(name.data() + at + kGpu.size(), name.data() + name.size(), number);
    by_number.emplace(number, name);
  }
  std::vector<std::string> ordered;
  for (auto& [number, name] : by_number) ordered.push_back(std::move(name));
  return ordered;
}

}  // namespace lockstep
