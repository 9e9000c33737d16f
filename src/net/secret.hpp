#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>
#include <string_view>

// The user's token, and the few cryptographic primitives that the network code needs.

namespace lockstep {

inline constexpr size_t kMacBytes = 32;

/// HMAC-SHA256 over the concatenated pieces. A piece of variable length must be preceded by its
/// length, or two different inputs could give the same code.
std::string hmac_sha256(std::string_view key, std::initializer_list<std::string_view> pieces);

/// Compares in constant time.
bool equal_secrets(std::string_view a, std::string_view b);

/// A new secret, in hexadecimal.
inline constexpr size_t kTokenDigits = 64;
std::string make_token();

/// The secret by which this user's launchers and ranks authenticate each other: LOCKSTEP_TOKEN, or
/// the file ~/.config/lockstep/token (under XDG_CONFIG_HOME if that is set). If there is no such
/// file, it is created, readable by its owner only. Hosts that share a home folder therefore share
/// the secret.
std::string load_or_make_token();

/// A session name that no other user can predict, derived from the session and the token. Sessions
/// that ranks derive by themselves, as under srun, are hashes of what every user can see; abstract
/// sockets have no owner, and a process that binds such a name first could block the rendezvous.
/// Without a token the result is the session itself.
std::string private_session(const std::string& session);

}  // namespace lockstep
