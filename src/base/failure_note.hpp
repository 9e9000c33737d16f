#pragma once

#include "lockstep/error.hpp"

namespace lockstep {

/// Tells whoever started this program why it fails: the launcher's board (LOCKSTEP_BOARD) and
/// torchrun's error file (TORCHELASTIC_ERROR_FILE), where they are set. A note that cannot be left
/// is not left; the failure itself goes its way.
void note_failure(const Error& error) noexcept;

}  // namespace lockstep
