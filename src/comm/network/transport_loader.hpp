#pragma once

#include <string>
#include <string_view>

#include "base/backends.hpp"
#include "comm/network/transport_module.h"

namespace lockstep {

/// The file of a module that is loaded at run time, such as "lockstep-gloo.so". It is looked for in
/// the folders of LOCKSTEP_MODULE_PATH, beside the program, in lib/lockstep of its prefix, in
/// lockstep/ beside a shared lockstep, along the program's run path, and in the prefix that
/// lockstep was configured with. "" if there is none.
std::string find_module(std::string_view file_name);

/// Loads a module once. kBackend if it is missing, cannot be loaded, or is of another version.
const LockstepTransportApi& load_transport(const ModuleInfo& module);

}  // namespace lockstep
