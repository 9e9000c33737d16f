// Why a peer gave up, as it arrives from another rank: the record, and the error made of it.

#include "comm/failure.hpp"
#include "fuzz.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  using namespace lockstep::fuzz;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto record = AbortRecord::decode(bytes);
  if (!record) return 0;
  const std::string again = record->encode();
  require(again == bytes.substr(0, again.size()), "a record survives writing and reading");
  const Group group = Group::world(1, 4);
  Fingerprint call;
  call.sequence = 17;
  try {
    throw_recorded(group, call, *record, "", 1'000'000'000);
  } catch (const CollectiveError& error) {
    require(!error.message().empty() && !error.help().empty(), "the error says what to do");
    require(error.blamed_rank() >= -1 && error.blamed_rank() < group.size(),
            "the error blames a rank of the group");
  }
  return 0;
}
