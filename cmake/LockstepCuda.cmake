# CUDA for a libtorch that has it: the compiler of the kernels, and the headers and libraries of the runtime.

# Sets CMAKE_CUDA_COMPILER. CMake learnt to compile CUDA 13 as C++20 after Debian 12's version.
function(lockstep_choose_cuda_compiler)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(nvcc nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin NO_CACHE)
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

# "13.0" from a cuda_runtime_api.h, which says CUDART_VERSION 13000.
function(lockstep_cuda_header_version header result)
  file(STRINGS "${header}" line REGEX "#define CUDART_VERSION +[0-9]+" LIMIT_COUNT 1)
  if(NOT line MATCHES "CUDART_VERSION +([0-9]+)")
    message(FATAL_ERROR "cannot read the CUDA version in ${header}")
  endif()
  math(EXPR major "${CMAKE_MATCH_1} / 1000")
  math(EXPR minor "${CMAKE_MATCH_1} % 1000 / 10")
  set(${result} "${major}.${minor}" PARENT_SCOPE)
endfunction()

# nvcc's toolkit must be of libtorch's CUDA. It also completes the headers: the pip packages that torch depends on leave
# out crt/, which belongs to the compiler (nvidia-cuda-crt). The toolkit comes second, so that all other headers still
# match the runtime that is linked.
function(lockstep_add_toolkit_headers target include_dir toolkit_includes)
  lockstep_cuda_header_version("${include_dir}/cuda_runtime_api.h" version)
  string(REGEX MATCH "^[0-9]+" major "${version}")
  set(completing "")
  foreach(folder IN LISTS toolkit_includes)
    if(EXISTS "${folder}/cuda_runtime_api.h")
      lockstep_cuda_header_version("${folder}/cuda_runtime_api.h" toolkit_version)
      if(NOT toolkit_version MATCHES "^${major}\\.")
        message(FATAL_ERROR "this libtorch uses CUDA ${version} (${include_dir}), but the toolkit of nvcc is CUDA "
          "${toolkit_version} (${folder}).\n"
          "help: install a CUDA ${major} toolkit and name its nvcc in CUDACXX, or configure with -DLOCKSTEP_CUDA=OFF")
      endif()
    endif()
    if(NOT completing AND EXISTS "${folder}/crt/host_defines.h")
      set(completing "${folder}")
    endif()
  endforeach()
  if(EXISTS "${include_dir}/crt/host_defines.h")
    return()
  endif()
  if(NOT completing)
    message(FATAL_ERROR "${include_dir} holds cuda_runtime_api.h but not crt/host_defines.h, which that file includes, "
      "and the toolkit of nvcc does not have it either.\n"
      "help: python3 -m pip install 'nvidia-cuda-crt==${version}.*', or install the headers of the CUDA ${major} "
      "toolkit, or configure with -DLOCKSTEP_CUDA=OFF")
  endif()
  target_include_directories(${target} SYSTEM INTERFACE "${completing}")
  message(STATUS "lockstep: CUDA's headers are from ${include_dir}, what it lacks from ${completing}")
endfunction()

# CUDA's libraries for `target`: from the pip packages beside torch, else from a toolkit. NCCL is optional. Sets
# include_dir, the folder of the runtime's headers.
function(lockstep_link_cuda_runtime target torch_root)
  file(GLOB header_candidates "${torch_root}/../nvidia/*/include/cuda_runtime_api.h")
  file(GLOB library_candidates "${torch_root}/../nvidia/*/lib/libcudart.so*")
  if(NOT header_candidates OR NOT library_candidates)
    find_path(cuda_include cuda_runtime_api.h
      HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES include NO_CACHE)
    find_library(cuda_library cudart HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES lib64 NO_CACHE)
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
  set(include_dir "${include_dir}" PARENT_SCOPE)
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

# The same, with the headers that the pip packages lack. toolkit_includes: the include folders of the toolkit that nvcc
# belongs to.
function(lockstep_add_cuda_runtime target torch_root toolkit_includes)
  lockstep_link_cuda_runtime(${target} "${torch_root}")
  lockstep_add_toolkit_headers(${target} "${include_dir}" "${toolkit_includes}")
endfunction()

# Links lockstep::torch with the CUDA half of libtorch and with lockstep::cuda_runtime.
function(lockstep_link_torch_cuda library_dir)
  # Without --no-as-needed the linker drops libtorch_cuda, and with it every CUDA kernel.
  target_link_libraries(lockstep::torch INTERFACE
    "-Wl,--push-state,--no-as-needed" "${library_dir}/libtorch_cuda.so" "-Wl,--pop-state"
    "${library_dir}/libc10_cuda.so" lockstep::cuda_runtime)
endfunction()

# For the build: the compiler of the kernels, then lockstep::cuda_runtime, linked by lockstep::torch.
macro(lockstep_enable_cuda)
  lockstep_choose_cuda_compiler()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)  # lockstep::cuda_runtime names the one that libtorch uses
  enable_language(CUDA)
  add_library(lockstep::cuda_runtime INTERFACE IMPORTED GLOBAL)
  lockstep_add_cuda_runtime(lockstep::cuda_runtime "${LOCKSTEP_TORCH_ROOT}" "${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES}")
  lockstep_link_torch_cuda("${LOCKSTEP_TORCH_LIB_DIR}")
endmacro()
