#include "device/rng.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>
#include <torch/library.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <atomic>
#include <bit>
#include <mutex>
#include <utility>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

// A dispatch key that libtorch reserves for modes, does not use itself, and handles before all
// others.
constexpr auto kModeKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local DeviceRng* current_rng = nullptr;
thread_local int repeatable_scopes = 0;

bool takes_generator(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.name() == "generator") return true;
  }
  return false;
}

// The device of the first tensor or device among an operation's arguments; the CPU if there is
// none.
c10::DeviceType device_of_call(c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined()) {
      return argument.toTensor().device().type();
    }
    if (argument.isDevice()) return argument.toDevice().type();
  }
  return c10::DeviceType::CPU;
}

// Runs in place of every operation with a `generator` argument while a UseRng is active.
void supply_generator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack) {
  const auto& formal = op.schema().arguments();
  const size_t first = stack->size() - formal.size();
  for (size_t i = 0; i < formal.size(); ++i) {
    auto& actual = (*stack)[first + i];
    if (formal[i].name() == "generator" && actual.isNone() && current_rng != nullptr) {
      const c10::ArrayRef<c10::IValue> arguments(stack->data() + first, formal.size());
      actual = current_rng->generator_for(device_of_call(arguments));
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kModeKey), stack);
}

// Dropout on a GPU draws inside one kernel that takes no generator. The older operation with the
// same kernel does.
void drop_out(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 3);  // input, p, train
  const at::Tensor input = arguments[0].toTensor();
  const double p = arguments[1].toDouble();
  const bool training = arguments[2].isNone() || arguments[2].toBool();
  if (!input.is_cuda() || !training || p <= 0 || p >= 1 || current_rng == nullptr) {
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kModeKey),
                       stack);
    return;
  }
  auto [output, mask] =
      at::_fused_dropout(input, 1 - p, current_rng->generator_for(c10::DeviceType::CUDA));
  torch::jit::drop(*stack, 3);
  torch::jit::push(*stack, std::move(output), mask.to(at::kBool));
}

void install_interception() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto* everything =
        new torch::Library(torch::Library::IMPL, "_", kModeKey, __FILE__, __LINE__);
    everything->fallback(torch::CppFunction::makeFallthrough());
    static auto* aten =
        new torch::Library(torch::Library::IMPL, "aten", kModeKey, __FILE__, __LINE__);
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.getNamespace() != "aten") continue;
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!op || !takes_generator(op->schema())) continue;
      const std::string full =
          name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      aten->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&supply_generator>());
    }
    aten->impl("native_dropout", torch::CppFunction::makeFromBoxedFunction<&drop_out>());
  });
}

// The bits of mt19937's first word that hold a mark.
constexpr uint32_t kMarkBits = 0x7fffffff;

// A hash of all state that determines which numbers the generator will give.
uint64_t fingerprint_of(at::CPUGeneratorImpl& generator, const at::mt19937_data_pod& engine) {
  const auto float_sample = generator.next_float_normal_sample();
  const auto double_sample = generator.next_double_normal_sample();
  const std::array<uint64_t, 4> rest = {
      engine.seed_, static_cast<uint64_t>(engine.next_) << 32 | static_cast<uint32_t>(engine.left_),
      float_sample ? uint64_t{1} << 32 | std::bit_cast<uint32_t>(*float_sample) : 0,
      double_sample ? std::bit_cast<uint64_t>(*double_sample) : 0};
  auto words = engine.state_;
  words[0] &= ~kMarkBits;
  return XXH3_64bits_withSeed(words.data(), sizeof(words), XXH3_64bits(rest.data(), sizeof(rest)));
}

// A mark that no generator has had before. It differs from `bits`, which it replaces.
DeviceRng::Mark next_mark(uint64_t fingerprint, uint32_t bits) {
  static std::atomic<uint64_t> marks{0};
  for (;;) {
    const uint64_t number = marks.fetch_add(1) + 1;
    const auto mixed = static_cast<uint32_t>(number * 0x9e3779b1U) & kMarkBits;
    if (mixed != bits) return {number, fingerprint, mixed};
  }
}

// Returns the mark in the generator, after writing a new one if the generator was seeded or drawn
// from since. See Note [How a seeding is noticed].
DeviceRng::Mark marked(at::Generator generator, DeviceRng::Mark& last) {
  const std::lock_guard lock(generator.mutex());
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  at::mt19937 engine = impl.engine();
  at::mt19937_data_pod data = engine.data();
  const uint64_t fingerprint = fingerprint_of(impl, data);
  const uint32_t bits = data.state_[0] & kMarkBits;
  if (last.number != 0 && last.fingerprint == fingerprint && last.bits == bits) return last;
  last = next_mark(fingerprint, bits);
  data.state_[0] = (data.state_[0] & ~kMarkBits) | last.bits;
  engine.set_data(data);
  impl.set_engine(engine);
  return last;
}

// libtorch 1.13 never frees what Generator::clone() returns, so it is not used on the CPU.
at::Generator copy_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  if (!generator.device().is_cpu()) return generator.clone();
  auto& from = *generator.get<at::CPUGeneratorImpl>();
  at::Generator copy = at::detail::createCPUGenerator();
  auto& to = *copy.get<at::CPUGeneratorImpl>();
  to.set_engine(from.engine());
  to.set_next_float_normal_sample(from.next_float_normal_sample());
  to.set_next_double_normal_sample(from.next_double_normal_sample());
  return copy;
}

}  // namespace

DeviceRng::DeviceRng(c10::Device device, int index)
    : index_(index), cpu_(at::detail::createCPUGenerator()) {
  install_interception();
  if (device.is_cuda()) cuda_ = at::globalContext().defaultGenerator(device).clone();
}

DeviceRng::DeviceRng(at::Generator cpu, std::optional<at::Generator> cuda)
    : index_(0), cpu_(std::move(cpu)), cuda_(std::move(cuda)) {
  install_interception();
}

DeviceRng::Mark DeviceRng::mark_of_thread() {
  static Mark default_mark;  // in the default generator, whose mutex guards it
  return current_rng != nullptr ? marked(current_rng->cpu_, current_rng->own_mark_)
                                : marked(at::detail::getDefaultCPUGenerator(), default_mark);
}

int64_t DeviceRng::position() {
  return mark_of_thread().number == last_mark_ ? static_cast<int64_t>(tasks_since_mark_) + 1 : 0;
}

void DeviceRng::set_position(int64_t position) {
  const Mark mark = mark_of_thread();
  last_mark_ = position > 0 ? mark.number : 0;
  tasks_since_mark_ = position > 0 ? static_cast<uint64_t>(position) - 1 : 0;
}

uint64_t DeviceRng::next_seed() {
  const Mark mark = mark_of_thread();
  tasks_since_mark_ = mark.number == last_mark_ ? tasks_since_mark_ + 1 : 0;
  last_mark_ = mark.number;
  const std::array<uint64_t, 3> parts = {mark.fingerprint, tasks_since_mark_,
                                         static_cast<uint64_t>(index_)};
  return XXH3_64bits(parts.data(), sizeof(parts));
}

void DeviceRng::reseed(uint64_t seed) {
  cpu_.set_current_seed(seed);
  if (cuda_) cuda_->set_current_seed(seed);
}

const at::Generator& DeviceRng::generator_for(c10::DeviceType type) const {
  return type == c10::DeviceType::CUDA && cuda_ ? *cuda_ : cpu_;
}

std::map<std::string, at::Generator> generators_of_thread(const std::vector<c10::Device>& gpus) {
  const DeviceRng* rng = current_rng;
  std::map<std::string, at::Generator> generators = {
      {"cpu", rng != nullptr ? rng->generator_for(c10::DeviceType::CPU)
                             : at::detail::getDefaultCPUGenerator()}};
  for (size_t i = 0; i < gpus.size(); ++i) {
    generators.emplace(fmt::format("cuda:{}", i),
                       rng != nullptr ? rng->generator_for(gpus[i].type())
                                      : at::globalContext().defaultGenerator(gpus[i]));
  }
  return generators;
}

RepeatableScope::RepeatableScope() {
  ++repeatable_scopes;
}

RepeatableScope::~RepeatableScope() {
  --repeatable_scopes;
}

void RepeatableScope::require_none(const std::string& device) {
  if (repeatable_scopes == 0) return;
  throw Error(Code::kUsage,
              fmt::format("a function under checkpoint_activations gave work to {}", device),
              "call checkpoint_activations inside the module that DataParallel replicates or "
              "Pipeline runs, not around it");
}

RecordedRng::RecordedRng(std::optional<c10::Device> gpu) {
  const auto generators =
      generators_of_thread(gpu ? std::vector<c10::Device>{*gpu} : std::vector<c10::Device>{});
  cpu_ = copy_of(generators.at("cpu"));
  if (!gpu) return;
  cuda_ = copy_of(generators.at("cuda:0"));
  if (current_rng == nullptr) default_gpu_ = gpu;
}

RecordedRng::Replay::Replay(const RecordedRng& recorded)
    : borrowed_(recorded.default_gpu_
                    ? std::optional(at::globalContext().defaultGenerator(*recorded.default_gpu_))
                    : std::nullopt),
      rng_(copy_of(recorded.cpu_), borrowed_        ? borrowed_
                                   : recorded.cuda_ ? std::optional(copy_of(*recorded.cuda_))
                                                    : std::nullopt),
      use_(rng_) {
  if (!borrowed_) return;
  const std::lock_guard lock(borrowed_->mutex());
  borrowed_state_ = borrowed_->get_state();
  borrowed_->set_state(recorded.cuda_->get_state());
}

RecordedRng::Replay::~Replay() {
  if (!borrowed_) return;
  const std::lock_guard lock(borrowed_->mutex());
  borrowed_->set_state(borrowed_state_);
}

UseRng::UseRng(DeviceRng& rng)
    : previous_(std::exchange(current_rng, &rng)),
      was_included_(c10::impl::tls_is_dispatch_key_included(kModeKey)) {
  c10::impl::tls_set_dispatch_key_included(kModeKey, true);
}

UseRng::~UseRng() {
  current_rng = previous_;
  c10::impl::tls_set_dispatch_key_included(kModeKey, was_included_);
}

}  // namespace lockstep
