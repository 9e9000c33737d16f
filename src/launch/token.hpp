#pragma once

#include <string>

namespace lockstep {

/// The secret by which this user's launchers and ranks know each other: LOCKSTEP_TOKEN, or the file
/// ~/.config/lockstep/token (under XDG_CONFIG_HOME where that is set), which is made, readable by
/// its owner alone, when there is none. Hosts that share a home folder so share the secret.
std::string load_or_make_token();

}  // namespace lockstep
