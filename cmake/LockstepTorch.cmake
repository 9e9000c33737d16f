# Finds exactly one libtorch and wraps it as the target lockstep::torch. Used by the build, and installed: by it
# find_package(lockstep) finds the libtorch of the machine it runs on.
#
# TorchConfig.cmake is not used. It mixes two libtorches when a pip torch and Debian's libtorch-dev
# are both present, demands a whole CUDA toolkit for a CUDA libtorch even when only host code is
# built, and needs a newer CMake than Debian's for CUDA 13. All we need is one folder.
#
#   LOCKSTEP_TORCH        the libtorch folder (it holds include/ and lib/); empty: look through
#                         CMAKE_PREFIX_PATH, then the system's libtorch-dev
#   LOCKSTEP_BLAS_RPATH   see lockstep_choose_system_blas

include("${CMAKE_CURRENT_LIST_DIR}/LockstepCuda.cmake")

set(LOCKSTEP_TORCH "" CACHE PATH "libtorch folder; empty: CMAKE_PREFIX_PATH, then the system's")
option(LOCKSTEP_BLAS_RPATH "let programs name OpenBLAS's OpenMP build where the system prefers another BLAS" ON)

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

# Sets LOCKSTEP_TORCH_ROOT (empty: the system's), torch_include and torch_lib_dir; or `problem`, where there is none.
function(lockstep_find_torch_folder hint problem)
  set(${problem} "" PARENT_SCOPE)
  set(root "")
  if(LOCKSTEP_TORCH)
    lockstep_torch_root_of("${LOCKSTEP_TORCH}" root)
    lockstep_is_libtorch("${root}" found)
    if(NOT found)
      string(CONCAT text "LOCKSTEP_TORCH=${LOCKSTEP_TORCH} is not a libtorch folder: it must hold "
        "include/torch/csrc/api/include/torch/torch.h and lib/libtorch.so.\n"
        "help: for a pip torch, use the folder that holds torch/__init__.py")
      set(${problem} "${text}" PARENT_SCOPE)
      return()
    endif()
  else()
    string(REPLACE ":" ";" env_prefixes "$ENV{CMAKE_PREFIX_PATH}")
    foreach(prefix IN LISTS CMAKE_PREFIX_PATH env_prefixes hint)
      lockstep_torch_root_of("${prefix}" candidate)
      lockstep_is_libtorch("${candidate}" found)
      if(found)
        set(root "${candidate}")
        break()
      endif()
    endforeach()
  endif()
  set(LOCKSTEP_TORCH_ROOT "${root}" PARENT_SCOPE)
  if(root)
    set(torch_include "${root}/include" PARENT_SCOPE)
    set(torch_lib_dir "${root}/lib" PARENT_SCOPE)
    return()
  endif()
  find_library(system_libtorch torch NO_CACHE PATHS /usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu
    NO_DEFAULT_PATH)
  if(NOT system_libtorch OR NOT EXISTS "/usr/include/torch/csrc/api/include/torch/torch.h")
    string(CONCAT text "no libtorch found.\n"
      "help: apt-get install libtorch-dev libopenblas0-openmp, or point at one with "
      "-DLOCKSTEP_TORCH=/path/to/site-packages/torch")
    set(${problem} "${text}" PARENT_SCOPE)
    return()
  endif()
  get_filename_component(library_dir "${system_libtorch}" DIRECTORY)
  set(torch_include "/usr/include" PARENT_SCOPE)
  set(torch_lib_dir "${library_dir}" PARENT_SCOPE)
endfunction()

# "1.13.1", or empty where no header says it.
function(lockstep_torch_version include_dir result)
  set(${result} "" PARENT_SCOPE)
  foreach(header "torch/headeronly/version.h" "torch/csrc/api/include/torch/version.h")
    if(EXISTS "${include_dir}/${header}")
      file(READ "${include_dir}/${header}" text)
      if(text MATCHES "VERSION_MAJOR ([0-9]+).*VERSION_MINOR ([0-9]+).*VERSION_PATCH ([0-9]+)")
        set(${result} "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3}" PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
endfunction()

# Debian's libtorch calls whatever libblas.so.3 the loader finds. Only the OpenMP build of OpenBLAS keeps thread budgets
# (docs/device.md). Where it is installed but Debian's alternatives prefer another BLAS, programs name its folder
# first, by DT_RPATH, which the loader also applies to libtorch's own dependencies. Distribution packages must not
# do so: -DLOCKSTEP_BLAS_RPATH=OFF leaves the choice to the alternatives.
function(lockstep_choose_system_blas library_dir)
  set(openmp_dir "${library_dir}/openblas-openmp")
  get_filename_component(blas "${library_dir}/libblas.so.3" REALPATH)
  if(blas MATCHES "openblas-openmp")
    message(STATUS "lockstep: BLAS is OpenBLAS (OpenMP), ${blas}")
  elseif(LOCKSTEP_BLAS_RPATH AND EXISTS "${openmp_dir}/libblas.so.3")
    target_link_options(lockstep::torch INTERFACE "LINKER:--disable-new-dtags" "LINKER:-rpath,${openmp_dir}")
    message(STATUS "lockstep: BLAS is OpenBLAS (OpenMP) in ${openmp_dir}, by run path; the system prefers ${blas}")
  elseif(blas MATCHES "openblas-pthread")
    message(WARNING "lockstep: the BLAS in use is the pthread build of OpenBLAS (${blas}): it ignores "
      "torch::set_num_threads, so thread budgets will not hold.\n"
      "help: apt-get install libopenblas0-openmp, then configure again")
  elseif(NOT blas MATCHES "openblas|blis|mkl")
    message(WARNING "lockstep: the BLAS in use is the REFERENCE one (${blas}): matrix products run about 30 "
      "times slower than they should.\n"
      "help: apt-get install libopenblas0-openmp, then configure again")
  endif()
endfunction()

# Says why the libtorch that was found cannot be used; empty if it can. `wanted`: the version that it must have, or empty.
function(lockstep_check_torch wanted result)
  set(${result} "" PARENT_SCOPE)
  if(NOT LOCKSTEP_TORCH_VERSION)
    set(${result} "cannot read the libtorch version under ${torch_include}" PARENT_SCOPE)
  elseif(LOCKSTEP_TORCH_VERSION VERSION_LESS 1.13)
    set(${result} "libtorch ${LOCKSTEP_TORCH_VERSION} in ${torch_lib_dir} is too old.\nhelp: lockstep needs 1.13 or newer"
      PARENT_SCOPE)
  elseif(EXISTS "${LOCKSTEP_TORCH_ROOT}/share/cmake/Torch/TorchConfig.cmake")
    # Wheels before 2.6 were built with the old std::string; nothing else on the system matches them.
    file(READ "${LOCKSTEP_TORCH_ROOT}/share/cmake/Torch/TorchConfig.cmake" torch_config)
    if(torch_config MATCHES "_GLIBCXX_USE_CXX11_ABI=0")
      string(CONCAT text "the libtorch in ${LOCKSTEP_TORCH_ROOT} uses the old C++ ABI.\n"
        "help: use PyTorch 2.6 or newer, or a libtorch download marked cxx11-abi")
      set(${result} "${text}" PARENT_SCOPE)
    endif()
  endif()
  if(wanted AND NOT LOCKSTEP_TORCH_VERSION VERSION_EQUAL wanted)
    string(CONCAT text "this lockstep was built with libtorch ${wanted}, but the one in ${torch_lib_dir} is "
      "${LOCKSTEP_TORCH_VERSION}.\n"
      "help: name a libtorch ${wanted} with -DLOCKSTEP_TORCH=DIR, or build lockstep with this one: "
      "scripts/quickstart --prefix DIR --torch DIR")
    set(${result} "${text}" PARENT_SCOPE)
  elseif(wanted AND TARGET torch)
    # find_package(Torch) came before: both must mean the same folder.
    get_target_property(other torch LOCATION)
    get_filename_component(other "${other}" REALPATH)
    get_filename_component(ours "${torch_lib_dir}/libtorch.so" REALPATH)
    if(EXISTS "${other}" AND NOT other STREQUAL ours)
      string(CONCAT text "find_package(Torch) found the libtorch ${other}, find_package(lockstep) ${ours}: a program must "
        "not mix two.\n"
        "help: leave find_package(Torch) out, since lockstep::lockstep brings libtorch; or name the folder of one of "
        "them with -DLOCKSTEP_TORCH=DIR")
      set(${result} "${text}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

# lockstep_find_torch(PROBLEM <variable> [HINT <folder>] [VERSION <version>]): makes lockstep::torch. HINT is tried after
# CMAKE_PREFIX_PATH and before the system's. VERSION is the only one accepted. What prevents it is left in the
# variable, with a remedy; empty: nothing does.
# Sets LOCKSTEP_TORCH_ROOT (empty: the system's), LOCKSTEP_TORCH_LIB_DIR, LOCKSTEP_TORCH_VERSION, LOCKSTEP_TORCH_HAS_CUDA.
function(lockstep_find_torch)
  cmake_parse_arguments(arg "" "HINT;PROBLEM;VERSION" "" ${ARGN})
  lockstep_find_torch_folder("${arg_HINT}" problem)
  if(NOT problem)
    lockstep_torch_version("${torch_include}" LOCKSTEP_TORCH_VERSION)
    lockstep_check_torch("${arg_VERSION}" problem)
  endif()
  set(${arg_PROBLEM} "${problem}" PARENT_SCOPE)
  if(problem)
    return()
  endif()

  # Imported, so that no path in it reaches the installed targets: they name lockstep::torch.
  add_library(lockstep::torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(lockstep::torch INTERFACE "${torch_include}/torch/csrc/api/include")
  if(LOCKSTEP_TORCH_ROOT)
    target_include_directories(lockstep::torch INTERFACE "${torch_include}")
    # PyTorch's wheels export a part of std::filesystem, which ends the process where it calls what they left out. The
    # loader must find the system's first.
    target_link_options(lockstep::torch INTERFACE
      "LINKER:--push-state,--no-as-needed,-lstdc++,--pop-state" "LINKER:-rpath,${torch_lib_dir}")
  else()
    lockstep_choose_system_blas("${torch_lib_dir}")
  endif()
  target_link_libraries(lockstep::torch INTERFACE
    "${torch_lib_dir}/libtorch.so" "${torch_lib_dir}/libtorch_cpu.so" "${torch_lib_dir}/libc10.so")
  set(LOCKSTEP_TORCH_HAS_CUDA FALSE PARENT_SCOPE)
  if(EXISTS "${torch_lib_dir}/libtorch_cuda.so")
    set(LOCKSTEP_TORCH_HAS_CUDA TRUE PARENT_SCOPE)
  endif()
  set(LOCKSTEP_TORCH_ROOT "${LOCKSTEP_TORCH_ROOT}" PARENT_SCOPE)
  set(LOCKSTEP_TORCH_LIB_DIR "${torch_lib_dir}" PARENT_SCOPE)
  set(LOCKSTEP_TORCH_VERSION "${LOCKSTEP_TORCH_VERSION}" PARENT_SCOPE)
endfunction()
