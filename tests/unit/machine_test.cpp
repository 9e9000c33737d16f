#include "base/machine.hpp"

#include <gtest/gtest.h>

namespace lockstep::test::machine_test {
namespace {

TEST(HiddenAmx, IsWhatIsAnnouncedAndNotDescribed) {
  EXPECT_FALSE(hides_amx({.announced = false, .highest_leaf = 0x1c, .most_palettes = 0}));
  EXPECT_FALSE(hides_amx({.announced = true, .highest_leaf = 0x20, .most_palettes = 1}));
  EXPECT_TRUE(hides_amx({.announced = true, .highest_leaf = 0x1c, .most_palettes = 0}));
  EXPECT_TRUE(hides_amx({.announced = true, .highest_leaf = 0x20, .most_palettes = 0}));
}

}  // namespace
}  // namespace lockstep::test::machine_test
