# shellcheck shell=bash disable=SC2034,SC2154  # variables cross between the sourced files
# The Debian packages lockstep stands on, each with its reason, and how they get installed.

build_packages=(
  g++                 # GCC 12 is the floor
  cmake               # 3.25, for presets and precompiled headers
  ninja-build         # the presets' generator
  ccache              # a file that includes torch takes 10 to 20 seconds to compile
  libcli11-dev        # flags of the programs
  libfmt-dev          # text formatting, inside .cpp files only
  nlohmann-json3-dev  # records
  libcairo2-dev       # charts and PDF of the labs' reports
  fonts-dejavu-core   # their letters
  libssl-dev          # HMAC of the rendezvous between hosts
  libgloo-dev         # ranks on several hosts
  libxxhash-dev       # random streams per device, checksums
  libgtest-dev        # the tests; configuring looks for it
)
system_torch_packages=(
  libtorch-dev         # the engine; its headers need no other -dev package
  libopenblas0-openmp  # libtorch-dev alone may bring the reference BLAS, 30 times slower; and only
                       # the OpenMP build keeps thread budgets
)
mpi_packages=(
  libopenmpi-dev  # the module of backend mpi; 10 MB, with openmpi-bin
  openmpi-bin     # mpirun, for its tests
)
deb_packages=(
  dpkg-dev  # dpkg-shlibdeps finds what the packages depend on
  file      # and tells programs from scripts for cpack
)
oracle_packages=(
  python3-torch  # the parity tests train the same model in PyTorch; brings python3-numpy
)
cluster_packages=(  # 13 MB; no daemon of them is needed, and the test brings up its own
  slurm-wlm  # the test `slurm` starts a controller and two nodes
  munge      # by which they know each other
)
fuzz_packages=(
  clang            # libFuzzer is part of it
  libclang-rt-dev  # and comes with the sanitizers' libraries
)

# What building needs, by other names than Debian's: a header, its Debian package, its conda-forge package.
needed_headers=(
  'CLI/CLI.hpp libcli11-dev cli11'
  'fmt/format.h libfmt-dev fmt'
  'nlohmann/json.hpp nlohmann-json3-dev nlohmann_json'
  'cairo/cairo-pdf.h libcairo2-dev cairo'
  'fontconfig/fontconfig.h libfontconfig-dev fontconfig'
  'openssl/hmac.h libssl-dev openssl'
  'xxhash.h libxxhash-dev xxhash'
)

# has_header HEADER: whether it is where compilers and CMake look for headers.
has_header() {
  local folder folders
  IFS=: read -ra folders <<<"/usr:/usr/local:${CMAKE_PREFIX_PATH:-}"
  for folder in "${folders[@]}"; do
    [[ ! -e $folder/include/$1 ]] || return 0
  done
  IFS=: read -ra folders <<<"${CPATH:-}:${CPLUS_INCLUDE_PATH:-}"
  for folder in "${folders[@]}"; do
    [[ -z $folder || ! -e $folder/$1 ]] || return 0
  done
  return 1
}

# require_parts: what lockstep is built from must be there already. Names all that is missing, with remedies for those
# who are root here and for those who are not.
require_parts() {
  local entry header debian conda missing=() debian_missing=() conda_missing=() version remedies=()
  version=$("${CXX:-g++}" -dumpfullversion 2>/dev/null) || version=0
  if ((${version%%.*} < 12)); then
    missing+=("GCC 12 or newer (${CXX:-g++} is ${version/#0/not there})") debian_missing+=(g++) conda_missing+=(gxx)
  fi
  for entry in "${needed_headers[@]}"; do
    read -r header debian conda <<<"$entry"
    has_header "$header" || { missing+=("$header") debian_missing+=("$debian") conda_missing+=("$conda"); }
  done
  if ! command -v cmake >/dev/null; then missing+=(cmake) debian_missing+=(cmake) conda_missing+=(cmake); fi
  if ! command -v ninja >/dev/null; then missing+=(ninja) debian_missing+=(ninja-build) conda_missing+=(ninja); fi
  if [[ -z $torch_dir && ! -e /usr/include/torch/csrc/api/include/torch/torch.h ]]; then
    missing+=(libtorch) debian_missing+=(libtorch-dev libopenblas0-openmp)
    remedies=("libtorch without root: python3 -m pip install torch, then scripts/${0##*/} --torch python with the rest of your flags")
  fi
  ((${#missing[@]})) || return 0
  if ((${#conda_missing[@]})); then
    remedies+=("without root: conda create -p ~/lockstep-parts -c conda-forge ${conda_missing[*]}; then export \
PATH=~/lockstep-parts/bin:\$PATH CMAKE_PREFIX_PATH=~/lockstep-parts and run this again")
  fi
  fail "missing for the build: $(printf '%s, ' "${missing[@]}" | sed 's/, $//')" \
    "an administrator: apt-get install ${debian_missing[*]}" "${remedies[@]}"
}

is_installed() {
  [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$1" 2>/dev/null) == ii* ]]
}

is_available() {
  [[ $(LC_ALL=C apt-cache policy "$1" 2>/dev/null) == *'Candidate: '[^\(]* ]]
}

as_root() {
  if ((EUID == 0)); then "$@"; else sudo "$@"; fi
}

# apt ARGUMENT...: hundreds of lines that matter only when it fails, so they go to a file.
apt_log=build/packages.log
apt() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@" \
    </dev/null >>"$apt_log" 2>&1
}

# install_packages PACKAGE...: nothing to do, and nothing asked, where all are there already.
install_packages() {
  local package missing=() updated=yes
  if ! command -v apt-get >/dev/null; then
    [[ -n $torch ]] || fail "this system has no apt-get, so Debian's libtorch cannot be installed" \
      "scripts/${0##*/} --torch python    takes the libtorch of the active Python's torch"
    warn "no apt-get here; these must be present under the names your system gives them: $*"
    return
  fi
  for package in "$@"; do
    is_installed "$package" || missing+=("$package")
  done
  if ((${#missing[@]} == 0)); then
    say "Packages: all $# are installed"
    return
  fi

  say "Packages: installing ${missing[*]}"
  if ((EUID != 0)) && ! command -v sudo >/dev/null; then
    fail "installing packages needs root, and there is no sudo" \
      "as root: apt-get update && apt-get install --no-install-recommends ${missing[*]}" \
      "then run scripts/${0##*/} again"
  fi
  echo "This takes a few minutes at the first time; apt-get writes to $apt_log"
  mkdir -p build && : >"$apt_log"
  apt -o APT::Update::Error-Mode=any update || updated=no
  for package in "${missing[@]}"; do
    is_available "$package" || refuse_missing_package "$package" "$updated"
  done
  apt install -y --no-install-recommends "${missing[@]}" || refuse_failed_install "$updated"
}

refuse_failed_install() {
  grep -a '^E: ' "$apt_log" | tail -n 3 >&2 || true
  [[ $1 == yes ]] || fail_without_network
  fail "apt-get could not install the packages" "read $apt_log" \
    "or install them by other means, then run scripts/${0##*/} --no-install"
}

fail_without_network() {
  fail "apt-get cannot reach the package archive" \
    "check the network and /etc/apt, then run scripts/${0##*/} again; the log is $apt_log"
}

# refuse_missing_package PACKAGE UPDATED: apt offers no such package; says whose fault that is.
refuse_missing_package() {
  [[ $2 == yes ]] || fail_without_network
  [[ $1 != libtorch-dev ]] || fail "this system's package archive has no libtorch-dev" \
    "scripts/${0##*/} --torch python    takes the libtorch of the active Python's torch"
  fail "this system's package archive has no $1" \
    "install it by other means, then run scripts/${0##*/} --no-install"
}

# Python follows Debian's BLAS alternative; lockstep's programs name the OpenMP build themselves.
warn_about_blas() {
  local blas
  blas=$(readlink -f /usr/lib/*-linux-gnu/libblas.so.3 2>/dev/null) || return 0
  case $blas in
    */openblas-openmp/*) ;;
    *) warn "python3-torch will use ${blas}: right results, but other speed and threads than lockstep's" \
      "(update-alternatives --display libblas.so.3-$(uname -m)-linux-gnu)" ;;
  esac
}
