#pragma once

namespace lockstep {

/// Whether this build has NCCL; without it make_nccl_backend() is an Error (kBackend).
bool nccl_is_built();

}  // namespace lockstep
