# Finds exactly one libtorch and wraps it as the target lockstep::torch.
#
# TorchConfig.cmake is not used. It mixes two libtorches when a pip torch and Debian's libtorch-dev
# are both present, demands a whole CUDA toolkit for a CUDA libtorch even when only host code is
# built, and needs a newer CMake than Debian's for CUDA 13. All we need is one folder.
#
#   LOCKSTEP_TORCH   the libtorch folder (it holds include/ and lib/); empty: look through
#                    CMAKE_PREFIX_PATH, then the system's libtorch-dev
# Sets: LOCKSTEP_TORCH_ROOT, LOCKSTEP_TORCH_VERSION, LOCKSTEP_TORCH_HAS_CUDA

include(LockstepCuda)

set(LOCKSTEP_TORCH "" CACHE PATH "libtorch folder; empty: CMAKE_PREFIX_PATH, then the system's")

# A folder is a libtorch when it holds both the C++ API header and the library.
function(lockstep_is_libtorch root result)
  set(${result} FALSE PARENT_SCOPE)
  if(EXISTS "${root}/include/torch/csrc/api/include/torch/torch.h" AND EXISTS "${root}/lib/libtorch.so")
    set(${result} TRUE PARENT_SCOPE)
  endif()
endfunction()

# People point at …/torch, …/torch/share/cmake or …/torch/share/cmake/Torch; all mean …/torch.
function(lockstep_torch_root_of path result)
  string(REGEX REPLACE "/share/cmake(/Torch)?/?$" "" root "${path}")
  set(${result} "${root}" PARENT_SCOPE)
endfunction()

function(lockstep_find_torch)
  if(LOCKSTEP_TORCH)
    lockstep_torch_root_of("${LOCKSTEP_TORCH}" root)
    lockstep_is_libtorch("${root}" found)
    if(NOT found)
      message(FATAL_ERROR "LOCKSTEP_TORCH=${LOCKSTEP_TORCH} is not a libtorch folder: it must hold "
        "include/torch/csrc/api/include/torch/torch.h and lib/libtorch.so.\n"
        "help: for a pip torch, use the folder that holds torch/__init__.py")
    endif()
    set(LOCKSTEP_TORCH_ROOT "${root}" PARENT_SCOPE)
    return()
  endif()
  set(prefixes ${CMAKE_PREFIX_PATH})
  string(REPLACE ":" ";" env_prefixes "$ENV{CMAKE_PREFIX_PATH}")
  foreach(prefix IN LISTS prefixes env_prefixes)
    lockstep_torch_root_of("${prefix}" root)
    lockstep_is_libtorch("${root}" found)
    if(found)
      set(LOCKSTEP_TORCH_ROOT "${root}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(LOCKSTEP_TORCH_ROOT "" PARENT_SCOPE)
endfunction()

function(lockstep_torch_version include_dir result)
  foreach(header "torch/headeronly/version.h" "torch/csrc/api/include/torch/version.h")
    if(EXISTS "${include_dir}/${header}")
      file(READ "${include_dir}/${header}" text)
      if(text MATCHES "VERSION_MAJOR ([0-9]+).*VERSION_MINOR ([0-9]+).*VERSION_PATCH ([0-9]+)")
        set(${result} "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  message(FATAL_ERROR "cannot read the libtorch version under ${include_dir}")
endfunction()

# Debian's libtorch calls whatever libblas.so.3 the loader finds. Only the OpenMP build of OpenBLAS
# keeps thread budgets (docs/device.md), so our programs name its folder first, by DT_RPATH, which
# the loader also applies to libtorch's own dependencies.
function(lockstep_choose_system_blas target library_dir)
  set(openmp_dir "${library_dir}/openblas-openmp")
  if(EXISTS "${openmp_dir}/libblas.so.3")
    target_link_options(${target} INTERFACE
      "LINKER:--disable-new-dtags" "LINKER:-rpath,${openmp_dir}")
    message(STATUS "lockstep: BLAS is OpenBLAS (OpenMP), ${openmp_dir}")
    return()
  endif()
  get_filename_component(blas "${library_dir}/libblas.so.3" REALPATH)
  if(blas MATCHES "openblas-pthread")
    message(WARNING "lockstep: the BLAS in use is the pthread build of OpenBLAS (${blas}): it ignores "
      "torch::set_num_threads, so thread budgets will not hold.\n"
      "help: apt-get install libopenblas0-openmp, then configure again")
  elseif(NOT blas MATCHES "openblas|blis|mkl")
    message(WARNING "lockstep: the BLAS in use is the REFERENCE one (${blas}): matrix products run about 30 "
      "times slower than they should.\n"
      "help: apt-get install libopenblas0-openmp, then configure again")
  endif()
endfunction()

lockstep_find_torch()
add_library(lockstep_torch INTERFACE)
add_library(lockstep::torch ALIAS lockstep_torch)

if(LOCKSTEP_TORCH_ROOT)
  set(torch_include "${LOCKSTEP_TORCH_ROOT}/include")
  set(torch_lib_dir "${LOCKSTEP_TORCH_ROOT}/lib")
else()
  set(torch_include "/usr/include")
  find_library(system_libtorch torch NO_CACHE PATHS /usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu
    NO_DEFAULT_PATH)
  if(NOT system_libtorch OR NOT EXISTS "${torch_include}/torch/csrc/api/include/torch/torch.h")
    message(FATAL_ERROR "no libtorch found.\n"
      "help: apt-get install libtorch-dev libopenblas0-openmp, or point at one with "
      "-DLOCKSTEP_TORCH=/path/to/site-packages/torch, or run scripts/quickstart --torch python")
  endif()
  get_filename_component(torch_lib_dir "${system_libtorch}" DIRECTORY)
endif()

lockstep_torch_version("${torch_include}" LOCKSTEP_TORCH_VERSION)
if(LOCKSTEP_TORCH_VERSION VERSION_LESS 1.13)
  message(FATAL_ERROR "libtorch ${LOCKSTEP_TORCH_VERSION} is too old.\nhelp: lockstep needs 1.13 or newer")
endif()

# Wheels before 2.6 were built with the old std::string; nothing else on the system matches them.
if(EXISTS "${LOCKSTEP_TORCH_ROOT}/share/cmake/Torch/TorchConfig.cmake")
  file(READ "${LOCKSTEP_TORCH_ROOT}/share/cmake/Torch/TorchConfig.cmake" torch_config)
  if(torch_config MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
    message(FATAL_ERROR "the libtorch in ${LOCKSTEP_TORCH_ROOT} uses the old C++ ABI.\n"
      "help: use PyTorch 2.6 or newer, or a libtorch download marked cxx11-abi")
  endif()
endif()

target_include_directories(lockstep_torch SYSTEM INTERFACE
  "${torch_include}/torch/csrc/api/include")
if(LOCKSTEP_TORCH_ROOT)
  target_include_directories(lockstep_torch SYSTEM INTERFACE "${torch_include}")
  target_link_options(lockstep_torch INTERFACE "LINKER:-rpath,${torch_lib_dir}")
else()
  lockstep_choose_system_blas(lockstep_torch "${torch_lib_dir}")
endif()
target_link_libraries(lockstep_torch INTERFACE
  "${torch_lib_dir}/libtorch.so" "${torch_lib_dir}/libtorch_cpu.so" "${torch_lib_dir}/libc10.so")

set(LOCKSTEP_TORCH_HAS_CUDA FALSE)
if(EXISTS "${torch_lib_dir}/libtorch_cuda.so")
  set(LOCKSTEP_TORCH_HAS_CUDA TRUE)
endif()
set(LOCKSTEP_CUDA "${LOCKSTEP_TORCH_HAS_CUDA}" CACHE BOOL "build the CUDA code (needs a libtorch with CUDA)")
if(LOCKSTEP_CUDA AND NOT LOCKSTEP_TORCH_HAS_CUDA)
  message(FATAL_ERROR "LOCKSTEP_CUDA=ON, but the libtorch in ${torch_lib_dir} has no CUDA.\n"
    "help: point LOCKSTEP_TORCH at a CUDA libtorch, e.g. the torch folder of `pip install torch`")
endif()
if(LOCKSTEP_CUDA)
  # Without --no-as-needed the linker drops libtorch_cuda, and with it every CUDA kernel.
  target_link_libraries(lockstep_torch INTERFACE
    "-Wl,--push-state,--no-as-needed" "${torch_lib_dir}/libtorch_cuda.so" "-Wl,--pop-state"
    "${torch_lib_dir}/libc10_cuda.so")
  lockstep_choose_cuda_compiler()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # lockstep_cuda_runtime names the one that libtorch uses
  enable_language(CUDA)
  add_library(lockstep_cuda_runtime INTERFACE)
  lockstep_add_cuda_runtime(lockstep_cuda_runtime "${LOCKSTEP_TORCH_ROOT}" "${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}")
  target_link_libraries(lockstep_torch INTERFACE lockstep_cuda_runtime)
endif()
message(STATUS "lockstep: libtorch ${LOCKSTEP_TORCH_VERSION} in ${torch_lib_dir}, CUDA ${LOCKSTEP_CUDA}")
