# Finds exactly one libtorch and wraps it as the target lockstep::torch.
#
# TorchConfig.cmake is not used. It mixes two libtorches when a pip torch and Debian's libtorch-dev
# are both present, demands a whole CUDA toolkit for a CUDA libtorch even when only host code is
# built, and needs a newer CMake than Debian's for CUDA 13. All we need is one folder.
#
#   LOCKSTEP_TORCH   the libtorch folder (it holds include/ and lib/); empty: look through
#                    CMAKE_PREFIX_PATH, then the system's libtorch-dev
# Sets: LOCKSTEP_TORCH_ROOT, LOCKSTEP_TORCH_VERSION, LOCKSTEP_TORCH_HAS_CUDA

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

# CUDA's headers and libraries as the target lockstep_cuda_runtime: from the pip packages beside torch, else from a
# toolkit. NCCL is optional.
function(lockstep_add_cuda_runtime target torch_root)
  file(GLOB header_candidates "${torch_root}/../nvidia/*/include/cuda_runtime_api.h")
  file(GLOB library_candidates "${torch_root}/../nvidia/*/lib/libcudart.so*")
  if(NOT header_candidates OR NOT library_candidates)
    find_path(cuda_include cuda_runtime_api.h
      PATHS /usr/local/cuda/include ENV CUDA_HOME PATH_SUFFIXES include NO_CACHE)
    find_library(cuda_library cudart PATHS /usr/local/cuda/lib64 ENV CUDA_HOME PATH_SUFFIXES lib64 NO_CACHE)
    set(header_candidates "${cuda_include}/cuda_runtime_api.h")
    set(library_candidates "${cuda_library}")
  endif()
  list(GET header_candidates 0 header)
  list(GET library_candidates 0 library)
  if(NOT EXISTS "${header}" OR NOT EXISTS "${library}")
    message(FATAL_ERROR "this libtorch has CUDA, but no cuda_runtime_api.h and libcudart.so were found.\n"
      "help: install the CUDA toolkit, set CUDA_HOME, or configure with -DLOCKSTEP_CUDA=OFF")
  endif()
  get_filename_component(include_dir "${header}" DIRECTORY)
  get_filename_component(library_dir "${library}" DIRECTORY)
  target_include_directories(${target} SYSTEM INTERFACE "${include_dir}")
  file(GLOB blas_lt "${library_dir}/libcublasLt.so*")
  if(NOT blas_lt)
    message(FATAL_ERROR "${library_dir} holds no libcublasLt.so.\n"
      "help: install cuBLAS beside the CUDA runtime, or configure with -DLOCKSTEP_CUDA=OFF")
  endif()
  list(GET blas_lt 0 blas_lt)
  target_link_libraries(${target} INTERFACE "${library}" "${blas_lt}")

  file(GLOB nccl_header "${torch_root}/../nvidia/nccl/include/nccl.h" "${include_dir}/nccl.h")
  file(GLOB nccl_library "${torch_root}/../nvidia/nccl/lib/libnccl.so*" "${library_dir}/libnccl.so*")
  if(nccl_header AND nccl_library)
    list(GET nccl_header 0 nccl_header)
    list(GET nccl_library 0 nccl_library)
    get_filename_component(nccl_include "${nccl_header}" DIRECTORY)
    target_include_directories(${target} SYSTEM INTERFACE "${nccl_include}")
    target_link_libraries(${target} INTERFACE "${nccl_library}")
    target_compile_definitions(${target} INTERFACE LOCKSTEP_NCCL=1)
  else()
    message(WARNING "lockstep: NCCL was not found beside this libtorch: GPU tensors between hosts go through their "
      "memory.\nhelp: install nccl.h and libnccl.so beside the CUDA runtime, then configure again")
  endif()
endfunction()

# nvcc, for the kernels. CMake learnt to compile CUDA 13 as C++20 after Debian 12's version.
function(lockstep_enable_cuda_compiler)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(nvcc nvcc PATHS /usr/local/cuda/bin ENV CUDA_HOME PATH_SUFFIXES bin NO_CACHE)
    if(NOT nvcc)
      message(FATAL_ERROR "this libtorch has CUDA, but there is no nvcc to compile kernels with.\n"
        "help: install the CUDA toolkit or set CUDACXX, or configure with -DLOCKSTEP_CUDA=OFF")
    endif()
    set(CMAKE_CUDA_COMPILER "${nvcc}" CACHE FILEPATH "the CUDA compiler")
  endif()
  if(CMAKE_VERSION VERSION_LESS 3.28)
    message(FATAL_ERROR "CMake ${CMAKE_VERSION} cannot compile CUDA as C++20.\n"
      "help: python3 -m pip install cmake, or configure with -DLOCKSTEP_CUDA=OFF")
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES "80-real;90" CACHE STRING "GPUs to compile for")
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
  add_library(lockstep_cuda_runtime INTERFACE)
  lockstep_add_cuda_runtime(lockstep_cuda_runtime "${LOCKSTEP_TORCH_ROOT}")
  target_link_libraries(lockstep_torch INTERFACE lockstep_cuda_runtime)
  lockstep_enable_cuda_compiler()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # lockstep_cuda_runtime names the one that libtorch uses
  enable_language(CUDA)
endif()
message(STATUS "lockstep: libtorch ${LOCKSTEP_TORCH_VERSION} in ${torch_lib_dir}, CUDA ${LOCKSTEP_CUDA}")
