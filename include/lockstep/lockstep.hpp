#pragma once

// Everything lockstep offers to a program that trains.

#include "lockstep/communicator.hpp"
#include "lockstep/data_parallel.hpp"
#include "lockstep/device.hpp"
#include "lockstep/distributed_data_parallel.hpp"
#include "lockstep/distributed_sampler.hpp"
#include "lockstep/engine.hpp"
#include "lockstep/error.hpp"
#include "lockstep/memory.hpp"
#include "lockstep/mesh.hpp"
#include "lockstep/record.hpp"
#include "lockstep/run_meter.hpp"
#include "lockstep/split.hpp"
#include "lockstep/tensor_file.hpp"
#include "lockstep/tensor_text.hpp"
#include "lockstep/trace.hpp"
#include "lockstep/units.hpp"
#include "lockstep/world.hpp"
