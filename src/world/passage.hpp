#pragma once

#include <torch/types.h>

#include <initializer_list>

#include "comm/backend.hpp"
#include "world/comm_state.hpp"

namespace lockstep {

/// How the tensors of one call reach a backend.
struct Route {
  enum class Way {
    kWhereTheyLie,  ///< the backend works in their memory
    kThroughHost,   ///< copies of a GPU's tensors go
    kStay,          ///< a rank alone on a GPU: the backend checks the call, no value moves
  };
  Backend& backend;
  Way way = Way::kWhereTheyLie;

  /// A GPU backend serves tensors that are all on its GPU, the host's backend all others.
  static Route of(const CommState& state, std::initializer_list<torch::Tensor> tensors);

  /// A message that a rank sends itself waits on the host until it is taken.
  static Route of_message(const CommState& state, const torch::Tensor& tensor);
};

/// A tensor on its way to a backend and back: itself, a copy on the host, or nothing.
class Passage {
 public:
  /// Refuses what no backend can move (kTensorMismatch).
  Passage(const char* operation, const torch::Tensor& tensor, Route::Way way);

  Buffer buffer() const { return {data(), count(), dtype_}; }
  ConstBuffer const_buffer() const { return {data(), count(), dtype_}; }
  int64_t bytes() const;  ///< of the tensor

  /// The memory is in use on the thread's current stream, too, whatever stream it was made for.
  void keep_for_current_stream() const;

  /// After a call that wrote: a copy's values go where they belong.
  void copy_back() const;

 private:
  void* data() const { return sent_.defined() ? sent_.data_ptr() : nullptr; }
  int64_t count() const { return sent_.defined() ? sent_.numel() : 0; }

  Dtype dtype_;
  torch::Tensor original_;
  torch::Tensor sent_;  // undefined where nothing moves
};

}  // namespace lockstep
