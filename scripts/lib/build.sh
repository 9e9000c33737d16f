# shellcheck shell=bash disable=SC2154  # variables cross between the sourced files
# Which libtorch, which build folder, and the build itself.

# choose_torch: turns --torch into torch_dir (empty: the system's libtorch) and build_dir.
choose_torch() {
  torch_dir=''
  build_dir=build/$preset
  case $torch in
    '') return ;;
    python) torch_dir=$(python_torch_dir) ;;
    *) torch_dir=$(cd "$torch" 2>/dev/null && pwd) || fail "--torch $torch: no such folder" \
      "give the folder that holds include/ and lib/ of a libtorch, or 'python'" ;;
  esac
  # Debian's python3-torch is the system's libtorch, without its headers.
  if [[ $torch_dir == /usr/lib/python3/dist-packages/torch ]]; then
    torch_dir='' torch=''
    return
  fi
  torch_dir=${torch_dir%/share/cmake*}
  [[ -e $torch_dir/lib/libtorch.so ]] || fail "--torch $torch: $torch_dir holds no lib/libtorch.so" \
    "give the folder that holds include/ and lib/ of a libtorch"
  build_dir+=-torch-$(torch_version "$torch_dir")
}

python_torch_dir() {
  local python dir
  python=$(command -v python3) || fail "--torch python: there is no python3" \
    "activate the environment that holds torch, or leave --torch out for the system's libtorch"
  dir=$("$python" -c 'import importlib.util, os
spec = importlib.util.find_spec("torch")
print(os.path.dirname(spec.origin) if spec and spec.origin else "")')
  [[ -n $dir ]] || fail "--torch python: $python has no torch" \
    "activate the environment that holds it, or: python3 -m pip install torch"
  printf '%s\n' "$dir"
}

# torch_version DIR: what tells this libtorch's build folder from another's.
torch_version() {
  if [[ -f $1/version.py ]]; then
    sed -n "s/^__version__ = '\(.*\)'/\1/p" "$1/version.py"
  elif [[ -f $1/build-version ]]; then
    cat "$1/build-version"
  else
    cksum <<<"$1" | cut -d' ' -f1
  fi
}

check_preset() {
  grep -q "\"name\": \"$preset\"" "$root/CMakePresets.json" ||
    usage_error "there is no preset '$preset' in CMakePresets.json"
}

check_tools() {
  local tool version
  for tool in cmake ninja; do
    command -v "$tool" >/dev/null || fail "$tool is not installed" \
      "install it from your system's packages, or: python3 -m pip install $tool"
  done
  version=$(cmake --version | sed -n 's/^cmake version //p')
  [[ $(printf '%s\n' 3.25 "$version" | sort -V | head -n1) == 3.25 ]] ||
    fail "cmake $version is too old: 3.25 is needed" "python3 -m pip install cmake"
}

with_tests=ON
configure() {
  local options=("-DLOCKSTEP_BUILD_TESTS=$with_tests")
  check_tools
  [[ -z $torch_dir ]] || options+=("-DLOCKSTEP_TORCH=$torch_dir")
  say "Configuring: preset $preset, in $build_dir"
  cmake --preset "$preset" -B "$build_dir" "${options[@]}"
}

# A compiler that reads torch's headers takes up to 2 GiB, so memory limits the jobs as cores do.
build_jobs() {
  local by_memory cores
  cores=$(nproc)
  by_memory=$(awk '/^MemAvailable:/ { print int($2 / 2097152) }' /proc/meminfo)
  if ((by_memory < 1)); then by_memory=1; fi
  echo $((by_memory < cores ? by_memory : cores))
}

# build TARGET...
build() {
  local jobs
  jobs=$(build_jobs)
  say "Building, $jobs at a time"
  cmake --build "$build_dir" --parallel "$jobs" --target "$@"
}
