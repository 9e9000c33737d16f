#include "lockstep/version.hpp"

namespace lockstep {

const char* const kVersion = LOCKSTEP_VERSION;

}  // namespace lockstep
