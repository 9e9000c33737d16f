// manifest.json of a checkpoint: as it is, and as the body of a manifest whose checksum is right.

#include "checkpoint/manifest.hpp"

#include "base/checksum.hpp"
#include "fuzz.hpp"

namespace lockstep::fuzz {
namespace {

std::string sealed(const std::string& body) {
  return "{\"checksum\": \"" + digest_text(checksum_of(body)) + "\",\n\"manifest\": " + body +
         "}\n";
}

void parse(const std::string& text) {
  accepts([&] {
    const Manifest manifest = parse_manifest("manifest.json", text);
    require(manifest.bytes() >= 0, "sizes of files add up");
    for (const auto& tensor : manifest.tensors) {
      require(tensor.bytes() >= 0 && tensor.bytes() <= manifest.bytes(),
              "no tensor is larger than all files");
      require(manifest.find(tensor.section, tensor.name) != nullptr,
              "a tensor is found by its name");
      for (const auto& piece : tensor.pieces) {
        require(runs_of(piece.slice).has_value(), "every piece has a valid layout");
      }
    }
    const std::string again = render(manifest);
    require_equal(again, render(parse_manifest("manifest.json", again)),
                  "a manifest survives writing and reading");
  });
}

}  // namespace
}  // namespace lockstep::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  lockstep::fuzz::parse(text);
  lockstep::fuzz::parse(lockstep::fuzz::sealed(text));
  return 0;
}
