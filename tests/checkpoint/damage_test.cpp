#include <gtest/gtest.h>

#include <filesystem>

#include "checkpoint/reader.hpp"
#include "checkpoint/store.hpp"
#include "small_checkpoint.hpp"
#include "support.hpp"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using test::read_bytes;
using test::save_small;
using test::ScratchFolder;
using test::step_if_right;
using test::write_bytes;

class DamageTest : public testing::Test {
 protected:
  void SetUp() override {
    CheckpointStore store(scratch_.file("a"));
    save_small(store, FileSystem::system(), 6, 1);
    for (const auto& entry : fs::directory_iterator(path_)) {
      names_.push_back(entry.path().filename().string());
    }
    ASSERT_EQ(names_.size(), 3U);
  }

  void expect_refused() {
    try {
      step_if_right(path_);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::kFileFormat) << error.block();
      EXPECT_FALSE(error.help().empty());
      EXPECT_NE(error.block().find("step-00000006"), std::string::npos) << error.block();
    }
  }

  ScratchFolder scratch_;
  const std::string path_ = scratch_.file("a/step-00000006");
  std::vector<std::string> names_;
};

TEST_F(DamageTest, EveryByteFlipIsRefused) {
  for (const auto& name : names_) {
    const std::string whole = read_bytes(path_ + "/" + name);
    for (size_t at = 0; at < whole.size(); ++at) {
      for (const int flip : {0x01, 0x20, 0x80}) {
        SCOPED_TRACE(testing::Message() << name << ", byte " << at << " ^ " << flip);
        std::string bytes = whole;
        bytes[at] = static_cast<char>(bytes[at] ^ flip);
        write_bytes(path_ + "/" + name, bytes);
        expect_refused();
      }
    }
    write_bytes(path_ + "/" + name, whole);
  }
  EXPECT_EQ(step_if_right(path_), 6);
}

TEST_F(DamageTest, EveryTruncationIsRefused) {
  for (const auto& name : names_) {
    const std::string whole = read_bytes(path_ + "/" + name);
    for (size_t size = 0; size < whole.size(); ++size) {
      SCOPED_TRACE(testing::Message() << name << " cut to " << size);
      write_bytes(path_ + "/" + name, whole.substr(0, size));
      expect_refused();
    }
    write_bytes(path_ + "/" + name, whole + "x");
    expect_refused();
    write_bytes(path_ + "/" + name, whole);
  }
}

TEST_F(DamageTest, AMissingFileIsRefused) {
  for (const auto& name : names_) {
    fs::rename(path_ + "/" + name, path_ + "/away");
    expect_refused();
    fs::rename(path_ + "/away", path_ + "/" + name);
  }
  fs::remove_all(path_);
  test::expect_error(Code::kFileRead, {path_, "not the folder"},
                     [&] { CheckpointReader r(path_); });
}

TEST_F(DamageTest, FilesOfAnotherStepAreRefused) {
  CheckpointStore store(scratch_.file("a"));
  save_small(store, FileSystem::system(), 7, 2);
  for (const auto& name : names_) {
    if (name == "manifest.json") continue;
    const std::string whole = read_bytes(path_ + "/" + name);
    write_bytes(path_ + "/" + name, read_bytes(scratch_.file("a/step-00000007/") + name));
    expect_refused();
    write_bytes(path_ + "/" + name, whole);
  }
}

TEST_F(DamageTest, NamesTheDamagedTensor) {
  std::string bytes = read_bytes(path_ + "/model.rank1.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_bytes(path_ + "/model.rank1.safetensors", bytes);
  test::expect_error(Code::kFileFormat, {"model.rank1.safetensors", "tensor weight"},
                     [&] { CheckpointReader(path_).verify(); });
}

TEST(Manifest, ForeignTextsAreRefused) {
  for (const std::string text :
       {"", "{}", "null", "[[[[", "{\"checksum\": \"\",\n\"manifest\": {}}\n", "PK\x03\x04"}) {
    test::expect_error(Code::kFileFormat, {"here/manifest.json"},
                       [&] { parse_manifest("here/manifest.json", text); });
  }
}

// A manifest with a right checksum around any JSON.
std::string sealed(const std::string& body) {
  return "{\"checksum\": \"" + digest_text(checksum_of(body)) + "\",\n\"manifest\": " + body +
         "}\n";
}

TEST(Manifest, WrongFieldsAreRefused) {
  Manifest manifest;
  manifest.files = {{"model.safetensors", 200, std::string(32, '0')}};
  manifest.tensors = {{"model",
                       "w",
                       Dtype::kF32,
                       {{"model.safetensors", std::string(32, 'a'), whole_slice({2, 2})}}}};
  manifest.values["seed"] = {{"all", 1}};
  const std::string text = render(manifest);
  const size_t begin = text.find("\"manifest\": ") + 12;
  const auto body = nlohmann::json::parse(text.substr(begin, text.size() - begin - 2));
  EXPECT_EQ(parse_manifest("m", sealed(body.dump())).tensors.size(), 1U);
  const auto refused = [&](const std::string& pointer, const nlohmann::json& value) {
    auto changed = body;
    changed[nlohmann::json::json_pointer(pointer)] = value;
    SCOPED_TRACE(pointer + " = " + value.dump());
    test::expect_error(Code::kFileFormat, {"m: "},
                       [&] { parse_manifest("m", sealed(changed.dump())); });
  };
  refused("/format", "something else");
  refused("/version", 2);
  refused("/step", -1);
  refused("/step", 1.5);
  refused("/files/0/name", "../../etc/passwd");
  refused("/files/0/name", ".hidden");
  refused("/files/0/name", "manifest.json");
  refused("/files/0/bytes", 3);
  refused("/files/0/xxh128", "abc");
  refused("/files", 3);
  refused("/tensors/0/dtype", "F8");
  refused("/tensors/0/shape", {2, 3'000'000'000'000});
  refused("/tensors/0/shape", {-1});
  refused("/tensors/0/pieces", nlohmann::json::array());
  refused("/tensors/0/pieces/0/file", "other.safetensors");
  refused("/tensors/0/pieces/0/blocks", nlohmann::json::array());
  refused("/values", 4);
  refused("/values/seed", 4);
  refused("/values/seed", {{"ranks", {1, 2}}});
  refused("/tensors/0", nullptr);
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += '[';
  test::expect_error(Code::kFileFormat, {"nests"}, [&] { parse_manifest("m", sealed(deep)); });
}

}  // namespace
}  // namespace lockstep
