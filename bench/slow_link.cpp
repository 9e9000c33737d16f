// A link between network namespaces that is slow, long or lossy, where the kernel has no netem: a
// TUN device in each namespace is a host's network card, and this program carries packets from one
// to the other. TCP above it is the kernel's own. Each host sends and receives at the given rate,
// frames' headers included. Where nothing is to be lost, what TCP hands over as one large packet
// travels as one, as in the kernel's own virtual links.
//
// usage: slow_link DEVICE GBIT DELAY_MS LOSS_PERCENT NAMESPACE=ADDRESS...    (needs root)
//
// GBIT 0: no limit. DELAY_MS: one way. Says "ready" when the devices are there: addresses and all
// else are the caller's. Ends with its standard input, and then prints what it has carried.
#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/clock.hpp"
#include "lockstep/error.hpp"
#include "net/socket.hpp"

namespace lockstep {
namespace {

// What the system puts before a packet: virtio_net_hdr, whose header is no C++.
struct PacketHead {
  uint8_t flags = 0;
  uint8_t kind = 0;  // kWhole, or a packet that stands for frames of frame_bytes each
  uint16_t header_bytes = 0;
  uint16_t frame_bytes = 0;
  uint16_t checksum_begin = 0;
  uint16_t checksum_offset = 0;
};
constexpr uint8_t kWhole = 0;

constexpr size_t kMostBytes = sizeof(PacketHead) + (64 << 10);
constexpr int64_t kEthernetBytes = 14;
constexpr int64_t kHeaderBytes = 52;       // IPv4, and TCP with timestamps
constexpr int64_t kQueueBytes = 32 << 20;  // that may wait for a host's link; more is lost
constexpr int kBatch = 8;                  // packets that are read before others are delivered

struct Settings {
  double gbit = 0;
  int64_t delay_ns = 0;
  double loss = 0;  // a share
};

struct Packet {
  int64_t due_ns = 0;  // when it begins to leave its sender; then when it arrives
  size_t bytes = 0;
  std::unique_ptr<std::byte[]> data;  // a PacketHead, and the packet
};

struct Host {
  Socket device;
  in_addr_t address = 0;
  int64_t sends_until_ns = 0;
  int64_t receives_until_ns = 0;
  std::deque<Packet> leaving;
  std::deque<Packet> coming;
};

[[noreturn]] void fail(const std::string& what) {
  throw Error(Code::kUsage, fmt::format("{}: {}", what, std::strerror(errno)),
              "a slow link needs root, network namespaces and TUN devices");
}

// This thread stays in the namespace.
Socket open_device(const std::string& space, const std::string& name, bool whole_packets) {
  const Socket there(::open(("/run/netns/" + space).c_str(), O_RDONLY | O_CLOEXEC));
  if (!there || ::setns(there.get(), CLONE_NEWNET) != 0) fail("namespace " + space);
  Socket device(::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
  if (!device) fail("/dev/net/tun");
  ifreq request{};
  name.copy(request.ifr_name, sizeof request.ifr_name - 1);
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  if (::ioctl(device.get(), TUNSETIFF, &request) != 0) fail("device " + name);
  const unsigned offload = TUN_F_CSUM | (whole_packets ? TUN_F_TSO4 : 0U);
  if (::ioctl(device.get(), TUNSETOFFLOAD, offload) != 0) fail("device " + name);
  return device;
}

// With the headers of each frame that a large packet stands for.
int64_t bytes_on_wire(const Packet& packet) {
  PacketHead head;
  std::memcpy(&head, packet.data.get(), sizeof head);
  const auto bytes = static_cast<int64_t>(packet.bytes - sizeof head);
  if (head.kind == kWhole) return bytes + kEthernetBytes;
  const int64_t headers = kHeaderBytes;
  const int64_t frames = (bytes - headers + head.frame_bytes - 1) / head.frame_bytes;
  return bytes - headers + frames * (headers + kEthernetBytes);
}

class Link {
 public:
  Link(const Settings& settings, std::vector<Host> hosts)
      : settings_(settings), hosts_(std::move(hosts)) {}

  void carry() {
    std::vector<pollfd> waiting{{STDIN_FILENO, POLLIN, 0}};
    for (const Host& host : hosts_) waiting.push_back({host.device.get(), POLLIN, 0});
    for (;;) {
      const int64_t next_ns = move_due();
      const int64_t left_ns = std::max<int64_t>(next_ns - monotonic_ns(), 0);
      const timespec left{left_ns / 1'000'000'000, left_ns % 1'000'000'000};
      if (::ppoll(waiting.data(), waiting.size(), next_ns == kNever ? nullptr : &left, nullptr) <
          0) {
        continue;
      }
      if (waiting[0].revents != 0) return;
      for (size_t i = 0; i < hosts_.size(); ++i) {
        if (waiting[i + 1].revents != 0) take_from(hosts_[i]);
      }
    }
  }

  std::string summary() const {
    return fmt::format(R"({{"packets": {}, "bytes": {}, "lost": {}}})", packets_, bytes_, lost_);
  }

 private:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  // Takes the next packet of a queue if its time has come.
  static std::optional<Packet> due(std::deque<Packet>& queue) {
    if (queue.empty() || queue.front().due_ns > monotonic_ns()) return std::nullopt;
    Packet packet = std::move(queue.front());
    queue.pop_front();
    return packet;
  }

  // Returns when the next packet is due.
  int64_t move_due() {
    for (Host& host : hosts_) {
      while (auto packet = due(host.leaving)) pass_on(std::move(*packet));
    }
    int64_t next_ns = kNever;
    for (Host& host : hosts_) {
      while (auto packet = due(host.coming)) {
        // A device that is down takes nothing: the packet is lost.
        if (::write(host.device.get(), packet->data.get(), packet->bytes) < 0) ++lost_;
        spare_.push_back(std::move(packet->data));
      }
      for (const auto* queue : {&host.leaving, &host.coming}) {
        if (!queue->empty()) next_ns = std::min(next_ns, queue->front().due_ns);
      }
    }
    return next_ns;
  }

  void take_from(Host& from) {
    for (int i = 0; i < kBatch; ++i) {
      Packet packet{.data = memory()};
      const ssize_t bytes = ::read(from.device.get(), packet.data.get(), kMostBytes);
      if (bytes <= 0) return spare_.push_back(std::move(packet.data));
      packet.bytes = static_cast<size_t>(bytes);
      if (receiver(packet) == nullptr) continue;  // not IPv4, or to nobody: the system's chatter
      send(from, std::move(packet));
    }
  }

  void send(Host& from, Packet packet) {
    const int64_t now_ns = monotonic_ns();
    const int64_t bytes = bytes_on_wire(packet);
    packet.due_ns = std::max(now_ns, from.sends_until_ns);
    ++packets_;
    bytes_ += bytes;
    if (packet.due_ns - now_ns > duration_ns(kQueueBytes) || dice_(random_) < settings_.loss) {
      ++lost_;
      return spare_.push_back(std::move(packet.data));
    }
    from.sends_until_ns = packet.due_ns + duration_ns(bytes);
    from.leaving.push_back(std::move(packet));
  }

  // The receiver's link takes a packet while the sender's does, or when those before it are
  // through.
  void pass_on(Packet packet) {
    Host& to = *receiver(packet);
    to.receives_until_ns =
        std::max(packet.due_ns, to.receives_until_ns) + duration_ns(bytes_on_wire(packet));
    packet.due_ns = to.receives_until_ns + settings_.delay_ns;
    to.coming.push_back(std::move(packet));
  }

  int64_t duration_ns(int64_t bytes) const {
    if (settings_.gbit == 0) return 0;
    return static_cast<int64_t>(static_cast<double>(bytes) * 8 / settings_.gbit);
  }

  Host* receiver(const Packet& packet) {
    iphdr head;
    if (packet.bytes < sizeof(PacketHead) + sizeof head) return nullptr;
    std::memcpy(&head, packet.data.get() + sizeof(PacketHead), sizeof head);
    for (Host& host : hosts_) {
      if (head.version == 4 && head.daddr == host.address) return &host;
    }
    return nullptr;
  }

  std::unique_ptr<std::byte[]> memory() {
    if (spare_.empty()) return std::make_unique_for_overwrite<std::byte[]>(kMostBytes);
    auto memory = std::move(spare_.back());
    spare_.pop_back();
    return memory;
  }

  const Settings settings_;
  std::vector<Host> hosts_;
  std::vector<std::unique_ptr<std::byte[]>> spare_;
  std::mt19937_64 random_{7};
  std::uniform_real_distribution<double> dice_{0, 1};
  int64_t packets_ = 0;
  int64_t bytes_ = 0;
  int64_t lost_ = 0;
};

int run(int argc, char** argv) {
  if (argc < 6) {
    throw Error(Code::kUsage, "give a device's name, Gbit/s, milliseconds, percent and hosts",
                "slow_link slow0 1 5 0 one=10.0.0.1 other=10.0.0.2");
  }
  const Settings settings{.gbit = std::atof(argv[2]),
                          .delay_ns = static_cast<int64_t>(std::atof(argv[3]) * 1e6),
                          .loss = std::atof(argv[4]) / 100};
  std::vector<Host> hosts;
  for (int argument = 5; argument < argc; ++argument) {
    const std::string_view text = argv[argument];
    const size_t middle = text.find('=');
    Host host;
    if (middle == text.npos ||
        ::inet_pton(AF_INET, std::string(text.substr(middle + 1)).c_str(), &host.address) != 1) {
      throw Error(Code::kUsage, fmt::format("\"{}\" is no NAMESPACE=ADDRESS", text), "");
    }
    host.device = open_device(std::string(text.substr(0, middle)), argv[1], settings.loss == 0);
    hosts.push_back(std::move(host));
  }
  // Packets are due to the microsecond, also where ranks take all cores.
  ::prctl(PR_SET_TIMERSLACK, 1);
  const sched_param first{.sched_priority = 1};
  ::sched_setscheduler(0, SCHED_FIFO, &first);
  fmt::print("ready\n");
  std::fflush(stdout);
  Link link(settings, std::move(hosts));
  link.carry();
  fmt::print("{}\n", link.summary());
  return 0;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  return lockstep::run_program(lockstep::run, argc, argv);
}
