#include "lockstep/mesh.hpp"

#include <fmt/format.h>

#include <set>

#include "lockstep/error.hpp"

namespace lockstep {
namespace {

void check_axes(const std::vector<MeshAxis>& axes, int ranks) {
  std::set<std::string> names;
  int64_t product = 1;
  std::string text;
  for (const auto& axis : axes) {
    if (axis.size < 1) {
      throw Error(Code::kWorld, fmt::format("mesh axis {} has size {}", axis.name, axis.size),
                  "every axis has at least one rank");
    }
    if (!names.insert(axis.name).second) {
      throw Error(Code::kWorld, fmt::format("two mesh axes are named {}", axis.name),
                  "give each axis a name of its own");
    }
    product *= axis.size;
    text += fmt::format("{}{} {}", text.empty() ? "" : " x ", axis.name, axis.size);
  }
  if (product == ranks) return;
  throw Error(Code::kWorld,
              fmt::format("the mesh {} needs {} ranks, but there are {}", text, product, ranks),
              fmt::format("start {} ranks, or change the axes", product));
}

}  // namespace

Mesh::Mesh(const Communicator& world, std::vector<MeshAxis> axes)
    : world_(world), axes_(std::move(axes)) {
  check_axes(axes_, world.size());
  coordinates_.resize(axes_.size());
  int rest = world.rank();
  for (size_t i = axes_.size(); i-- > 0;) {
    coordinates_[i] = rest % axes_[i].size;
    rest /= axes_[i].size;
  }
  for (size_t i = 0; i < axes_.size(); ++i) {
    std::vector<bool> inside(axes_.size(), false);
    inside[i] = true;
    groups_.push_back(split(inside));
  }
}

Communicator Mesh::split(const std::vector<bool>& inside) const {
  int group = 0;  // numbered by the coordinates that its ranks share
  std::string name;
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (inside[i]) {
      name += fmt::format("{}{}", name.empty() ? "" : " x ", axes_[i].name);
    } else {
      group = group * axes_[i].size + coordinates_[i];
    }
  }
  return world_.split(group, world_.rank(), fmt::format("{} {}", name, group));
}

Communicator Mesh::plane(const std::vector<std::string>& names) const {
  std::vector<bool> inside(axes_.size(), false);
  for (const auto& name : names) {
    const size_t axis = index_of(name);
    if (inside[axis]) {
      throw Error(Code::kWorld, fmt::format("a plane of the mesh names the axis {} twice", name),
                  "name each axis once");
    }
    inside[axis] = true;
  }
  if (names.empty()) {
    throw Error(Code::kWorld, "a plane of the mesh names no axis",
                "name one axis at least; Communicator::self() is a rank alone");
  }
  return split(inside);
}

size_t Mesh::index_of(std::string_view name) const {
  std::vector<std::string> names;
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name == name) return i;
    names.push_back(axes_[i].name);
  }
  const std::string meant = did_you_mean(name, names);
  throw Error(Code::kWorld, fmt::format("the mesh has no axis {}", name),
              meant.empty() ? "name one of the axes it was made with"
                            : fmt::format("did you mean {}?", meant));
}

const Communicator& Mesh::axis(std::string_view name) const {
  return groups_[index_of(name)];
}

int Mesh::coordinate(std::string_view name) const {
  return coordinates_[index_of(name)];
}

}  // namespace lockstep
