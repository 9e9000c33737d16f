#pragma once

#include <string>

namespace lockstep {

/// The secret by which this user's launchers and ranks know each other: LOCKSTEP_TOKEN, or the file
/// ~/.config/lockstep/token (under XDG_CONFIG_HOME where that is set), which is made, readable by
/// its owner alone, when there is none. Hosts that share a home folder so share the secret.
std::string load_or_make_token();

/// A name for a session that nobody but this user can foresee, made of the session and the token.
/// Sessions that ranks derive by themselves, as under srun, are hashes of what every user can see;
/// sockets have no owner, and whoever binds such a name first would keep the ranks from meeting.
/// Where there can be no token the session itself is the name.
std::string private_session(const std::string& session);

}  // namespace lockstep
