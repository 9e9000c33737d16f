#include "base/file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <thread>
#include <vector>

#include "support.hpp"

namespace lockstep::test::file_test {
namespace {

TEST(ReadTextFile, GivesEveryByte) {
  const ScratchFolder scratch;
  std::string bytes(200'001, 'x');
  bytes[70'000] = '\0';
  bytes.back() = '\xff';
  test::write_bytes(scratch.file("a"), bytes);
  EXPECT_EQ(read_text_file(scratch.file("a")), bytes);
  test::write_bytes(scratch.file("empty"), "");
  EXPECT_EQ(read_text_file(scratch.file("empty")), "");
}

TEST(ReadTextFile, NamesPathAndReason) {
  const ScratchFolder scratch;
  expect_error(Code::kFileRead, {scratch.file("missing"), "No such file"},
               [&] { read_text_file(scratch.file("missing")); });
  expect_error(Code::kFileRead, {scratch.file(""), "it is a folder"},
               [&] { read_text_file(scratch.file("")); });
}

TEST(WriteFile, ReplacesTheOldFileAndLeavesNothingBeside) {
  const ScratchFolder scratch;
  const std::string path = scratch.file("a");
  write_file_atomically(path, "first, and longer");
  EXPECT_EQ(read_bytes(path), "first, and longer");
  write_file_atomically(path, "second");
  EXPECT_EQ(read_bytes(path), "second");
  write_file_atomically(path, "");
  EXPECT_EQ(read_bytes(path), "");
  EXPECT_EQ(scratch.count(), 1U);
}

// The new file has the mode, whatever that of the old one was.
TEST(WriteFile, AFileCanBeItsOwnersAlone) {
  const ScratchFolder scratch;
  const std::string path = scratch.file("a");
  const auto mode = [&] {
    struct stat status {};
    ::stat(path.c_str(), &status);
    return status.st_mode & 0777;
  };
  const mode_t before = ::umask(022);
  write_file_atomically(path, "for all");
  EXPECT_EQ(mode(), 0644U);
  write_file_atomically(path, "secret", 0600);
  EXPECT_EQ(mode(), 0600U);
  ::umask(before);
}

TEST(WriteFile, PutsPiecesOneAfterTheOther) {
  const ScratchFolder scratch;
  const std::string one = "one,";
  const std::string two = "two";
  const std::array<std::span<const std::byte>, 3> pieces = {
      std::as_bytes(std::span(one)), std::span<const std::byte>(), std::as_bytes(std::span(two))};
  write_file_atomically(scratch.file("a"), pieces);
  EXPECT_EQ(read_bytes(scratch.file("a")), "one,two");
}

// A writer that is killed in the middle leaves its file until the next writer comes. That of a
// writer that lives is left alone.
TEST(WriteFile, RemovesWhatAKilledWriterLeft) {
  const ScratchFolder scratch;
  const std::string left = scratch.file("a.tmp-1-0"), in_use = scratch.file("a.tmp-1-1");
  test::write_bytes(left, "half");
  test::write_bytes(in_use, "half");
  test::write_bytes(scratch.file("b.tmp-1-0"), "of another file");
  const Descriptor writer(::open(in_use.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(::flock(writer.get(), LOCK_EX), 0);
  write_file_atomically(scratch.file("a"), "text");
  EXPECT_FALSE(std::filesystem::exists(left));
  EXPECT_TRUE(std::filesystem::exists(in_use));
  EXPECT_EQ(scratch.count(), 3U);
}

TEST(WriteFile, RelativePathsWork) {
  const ScratchFolder scratch;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(scratch.file(""));
  write_file_atomically("here", "text");
  std::filesystem::current_path(before);
  EXPECT_EQ(read_bytes(scratch.file("here")), "text");
}

TEST(WriteFile, RefusesAFolderAsTarget) {
  const ScratchFolder scratch;
  std::filesystem::create_directory(scratch.file("folder"));
  expect_error(Code::kFileWrite, {scratch.file("folder"), "Is a directory", "name a file"},
               [&] { write_file_atomically(scratch.file("folder"), "text"); });
  EXPECT_EQ(scratch.count(), 1U);
}

TEST(WriteFile, RefusesAMissingFolder) {
  const ScratchFolder scratch;
  expect_error(Code::kFileWrite, {scratch.file("no/a"), "No such file", "make its folder first"},
               [&] { write_file_atomically(scratch.file("no/a"), "text"); });
  expect_error(Code::kFileWrite, {"No such file"}, [] { write_file_atomically("", "text"); });
}

TEST(WriteFile, RefusesAFileUsedAsFolder) {
  const ScratchFolder scratch;
  test::write_bytes(scratch.file("a"), "text");
  expect_error(Code::kFileWrite, {"Not a directory"},
               [&] { write_file_atomically(scratch.file("a/b"), "text"); });
}

// Neither root nor anyone else may make files in /proc.
TEST(WriteFile, RefusesAnUnwritableFolder) {
  expect_error(Code::kFileWrite, {"/proc/lockstep-test"},
               [] { write_file_atomically("/proc/lockstep-test", "text"); });
}

TEST(WriteFile, RefusesANameThatIsTooLong) {
  const ScratchFolder scratch;
  expect_error(Code::kFileWrite, {"File name too long"},
               [&] { write_file_atomically(scratch.file(std::string(300, 'n')), "text"); });
}

TEST(WriteFile, AFullDiskIsAnErrorThatSaysSo) {
  expect_error(Code::kCheckpoint, {"/dev/full", "No space left", "free some space"},
               [] { write_file_atomically("/dev/full", "text"); });
}

// As root a rename would replace even /dev/null.
TEST(WriteFile, PipesAndDevicesAreWrittenAndNeverReplaced) {
  const ScratchFolder scratch;
  const std::string pipe = scratch.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::string received;
  std::thread reader([&] { received = read_bytes(pipe); });
  write_file_atomically(pipe, "through");
  reader.join();
  EXPECT_EQ(received, "through");
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
}

TEST(WriteFile, ASymbolicLinkStaysALink) {
  const ScratchFolder scratch;
  std::filesystem::create_directory(scratch.file("folder"));
  test::write_bytes(scratch.file("folder/real"), "old");
  std::filesystem::create_symlink(scratch.file("folder/real"), scratch.file("link"));
  write_file_atomically(scratch.file("link"), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(scratch.file("link")));
  EXPECT_EQ(read_bytes(scratch.file("folder/real")), "new");
}

TEST(WriteFile, ReadersSeeOneWholeVersionWhileThreadsWrite) {
  const ScratchFolder scratch;
  const std::string path = scratch.file("a");
  const std::array<std::string, 2> texts = {std::string(50'000, 'a'), std::string(90'000, 'b')};
  write_file_atomically(path, texts[0]);
  std::vector<std::thread> writers;
  for (const auto& text : texts) {
    writers.emplace_back([&] {
      for (int i = 0; i < 20; ++i) write_file_atomically(path, text);
    });
  }
  for (int i = 0; i < 100; ++i) {
    const std::string seen = read_text_file(path);
    EXPECT_TRUE(seen == texts[0] || seen == texts[1]) << seen.size() << " bytes";
  }
  for (auto& writer : writers) writer.join();
  EXPECT_EQ(scratch.count(), 1U);
}

}  // namespace
}  // namespace lockstep::test::file_test
