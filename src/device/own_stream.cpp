#include "device/own_stream.hpp"

#include "lockstep/error.hpp"

#if LOCKSTEP_CUDA
#include "device/cuda/support.hpp"
#endif

namespace lockstep {
namespace {

c10::Stream take_stream(torch::Device gpu) {
#if LOCKSTEP_CUDA
  return cuda::take_stream(gpu.index());
#else
  throw Error(Code::kInternal, "a stream of " + gpu.str() + " in a build without CUDA");
#endif
}

}  // namespace

OwnStream::OwnStream(torch::Device gpu) : stream_(take_stream(gpu)) {}

OwnStream::~OwnStream() {
#if LOCKSTEP_CUDA
  cuda::give_back_stream(stream_);
#endif
}

}  // namespace lockstep
