#pragma once

// Digits in the format of MNIST (IDX), drawn by this program where the real files are not there:
// each is a pen stroke that is shifted, turned, sheared, stretched and bent at random, of random
// width, on a noisy background. The real files may be put in their place.

#include <array>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

namespace drawn_digits {

constexpr int kSide = 28;  // pixels

struct Point {
  double x;
  double y;
};

// Strokes in a square from 0 to 1, y downwards; a pen that goes on from point to point.
inline const std::vector<std::vector<Point>>& strokes_of(int digit) {
  static const std::array<std::vector<std::vector<Point>>, 10> strokes = {{
      {{{.5, .05},
        {.2, .2},
        {.12, .5},
        {.2, .8},
        {.5, .95},
        {.8, .8},
        {.88, .5},
        {.8, .2},
        {.5, .05}}},
      {{{.3, .25}, {.55, .05}, {.55, .95}}},
      {{{.15, .25}, {.35, .06}, {.7, .08}, {.82, .3}, {.6, .55}, {.15, .93}, {.85, .93}}},
      {{{.18, .1}, {.78, .1}, {.45, .42}, {.8, .6}, {.75, .88}, {.4, .96}, {.15, .84}}},
      {{{.7, .95}, {.7, .05}, {.12, .65}, {.9, .65}}},
      {{{.8, .07}, {.25, .07}, {.2, .45}, {.6, .4}, {.84, .65}, {.7, .92}, {.35, .96}, {.14, .82}}},
      {{{.72, .06},
        {.35, .3},
        {.15, .65},
        {.3, .93},
        {.65, .95},
        {.84, .72},
        {.65, .52},
        {.2, .62}}},
      {{{.14, .08}, {.86, .08}, {.55, .5}, {.4, .95}}},
      {{{.5, .48},
        {.22, .3},
        {.35, .07},
        {.65, .07},
        {.78, .3},
        {.5, .48},
        {.18, .7},
        {.32, .95},
        {.68, .95},
        {.82, .7},
        {.5, .48}}},
      {{{.8, .35}, {.55, .5}, {.22, .4}, {.2, .15}, {.5, .05}, {.8, .2}, {.8, .5}, {.65, .95}}},
  }};
  return strokes[static_cast<size_t>(digit)];
}

inline double distance(Point p, Point a, Point b) {
  const double dx = b.x - a.x;
  const double dy = b.y - a.y;
  const double along = ((p.x - a.x) * dx + (p.y - a.y) * dy) / (dx * dx + dy * dy + 1e-12);
  const double t = std::min(1.0, std::max(0.0, along));
  return std::hypot(p.x - a.x - t * dx, p.y - a.y - t * dy);
}

// kSide * kSide pixels, 0 (background) to 255 (ink).
inline std::vector<uint8_t> draw(int digit, std::mt19937& random) {
  const auto uniform = [&](double low, double high) {
    return low + (high - low) * static_cast<double>(random() >> 8) / (1 << 24);
  };
  const double angle = uniform(-0.3, 0.3);
  const double shear = uniform(-0.3, 0.3);
  const double wide = uniform(12, 19);
  const double high = uniform(15, 22);
  const Point middle{kSide / 2 + uniform(-3, 3), kSide / 2 + uniform(-3, 3)};
  const double width = uniform(0.7, 1.9);
  const double ink = uniform(170, 255);
  const auto place = [&](Point p) -> Point {
    const double y = (p.y - 0.5 + uniform(-0.03, 0.03)) * high;
    const double x = (p.x - 0.5 + uniform(-0.03, 0.03)) * wide + shear * y;
    return {middle.x + x * std::cos(angle) - y * std::sin(angle),
            middle.y + x * std::sin(angle) + y * std::cos(angle)};
  };
  std::vector<std::vector<Point>> placed;
  for (const auto& stroke : strokes_of(digit)) {
    placed.emplace_back();
    for (const Point point : stroke) placed.back().push_back(place(point));
  }
  std::vector<uint8_t> pixels;
  for (int row = 0; row < kSide; ++row) {
    for (int column = 0; column < kSide; ++column) {
      double nearest = kSide;
      for (const auto& stroke : placed) {
        for (size_t i = 1; i < stroke.size(); ++i) {
          nearest =
              std::min(nearest, distance({column + 0.5, row + 0.5}, stroke[i - 1], stroke[i]));
        }
      }
      const double covered = std::min(1.0, std::max(0.0, width + 0.5 - nearest));
      const double value = ink * covered + uniform(0, 40);
      pixels.push_back(static_cast<uint8_t>(std::min(255.0, value)));
    }
  }
  return pixels;
}

// A file appears complete or not at all.
inline void write_idx(const std::string& path, const std::vector<uint32_t>& shape,
                      const std::vector<uint8_t>& bytes) {
  {
    std::ofstream file(path + ".part", std::ios::binary);
    const auto big_endian = [&](uint32_t number) {
      for (int shift = 24; shift >= 0; shift -= 8) file.put(static_cast<char>(number >> shift));
    };
    big_endian(0x0800 + static_cast<uint32_t>(shape.size()));
    for (const uint32_t size : shape) big_endian(size);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }
  std::filesystem::rename(path + ".part", path);
}

// Writes images and labels of one part ("train" or "t10k"), unless they are there.
inline void write_part(const std::string& folder, const std::string& part, uint32_t count,
                       uint32_t seed) {
  const std::string images = folder + "/" + part + "-images-idx3-ubyte";
  const std::string labels = folder + "/" + part + "-labels-idx1-ubyte";
  if (std::filesystem::exists(images) && std::filesystem::exists(labels)) return;
  std::filesystem::create_directories(folder);
  std::mt19937 random(seed);
  std::vector<uint8_t> pixels;
  std::vector<uint8_t> digits;
  for (uint32_t i = 0; i < count; ++i) {
    digits.push_back(static_cast<uint8_t>(random() % 10));
    const auto drawn = draw(digits.back(), random);
    pixels.insert(pixels.end(), drawn.begin(), drawn.end());
  }
  write_idx(images, {count, kSide, kSide}, pixels);
  write_idx(labels, {count}, digits);
}

}  // namespace drawn_digits
