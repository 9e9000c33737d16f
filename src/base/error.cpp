#include "lockstep/error.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace lockstep {
namespace {

std::string format_block(Code code, const std::string& message, const std::string& help,
                         const std::vector<std::string>& notes) {
  std::string block = fmt::format("error[{}]: {}", code_name(code), message);
  for (const auto& note : notes) block += "\nnote: " + note;
  if (!help.empty()) block += "\nhelp: " + help;
  return block;
}

// Insertions, deletions, substitutions and swaps of neighbours that turn one word into the other.
size_t edit_distance(std::string_view from, std::string_view to) {
  std::vector<size_t> before;  // the row of i - 2
  std::vector<size_t> last;    // of i - 1
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= from.size(); ++i) {
    before = std::exchange(last, row);
    row[0] = i;
    for (size_t j = 1; j <= to.size(); ++j) {
      const size_t substitution = last[j - 1] + (from[i - 1] == to[j - 1] ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, substitution});
      const bool swapped = i > 1 && j > 1 && from[i - 1] == to[j - 2] && from[i - 2] == to[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row.back();
}

}  // namespace

const std::vector<CodeInfo>& all_codes() {
  static const std::vector<CodeInfo> codes = {
      {Code::kInternal, "internal error",
       "lockstep reached a state that should be impossible. Please report it with the command "
       "you ran."},
      {Code::kUsage, "bad flag or value",
       "A flag is unknown, or its value is missing, not a number, or out of range. Nothing was "
       "started. Run the program with --help for its flags and their ranges."},
      {Code::kDeviceSpec, "bad --devices",
       "--devices names logical devices: cpu:4 (four on this machine's cores), cuda (every GPU), "
       "cuda:0,1 (those two), cuda:0*4 (four that share GPU 0)."},
      {Code::kDeviceMissing, "no such device",
       "--devices names a GPU that this machine does not have, or this build of lockstep has no "
       "CUDA. `lockstep doctor` lists what is here; --devices cpu:2 always works."},
      {Code::kFileRead, "cannot read a file",
       "The file does not exist, is a folder, or may not be read."},
      {Code::kFileFormat, "damaged or foreign file",
       "The file does not have the expected format: its header, offsets or lengths contradict "
       "each other or its size. Nothing of it was used. Write it again, for example with "
       "safetensors.torch.save_file in Python."},
      {Code::kTensorMismatch, "tensors do not match",
       "The file is sound, but a tensor is missing, unexpected, or has another shape or dtype "
       "than the model or the flags ask for. The message names the tensor and both sides."},
      {Code::kFileWrite, "cannot write a file",
       "The folder does not exist or may not be written. A file that existed before is untouched: "
       "lockstep writes a new file beside it and renames that at the end."},
      {Code::kSplit, "inputs cannot be divided",
       "DataParallel divides every tensor argument along dimension 0 by torch.chunk's rule. "
       "Every tensor must have a dimension 0, and all must have the same number of rows there."},
      {Code::kPlacement, "wrong device",
       "The module's parameters must be on the first logical device, because that is where "
       "gradients are summed. Move it first: module->to(devices[0].torch_device())."},
      {Code::kReplicate, "module cannot be replicated",
       "A replica is made by clone(), which plain torch::nn::Module does not have. Derive the "
       "module from torch::nn::Cloneable<Net>, or pass DataParallel a function that makes a "
       "fresh one."},
      {Code::kReplicaFailed, "a replica failed",
       "The module threw while it ran on one logical device. The message names replica and "
       "device and ends with the module's own error. DataParallel waited for the other replicas "
       "before it threw."},
      {Code::kEngine, "libtorch problem",
       "The libtorch in use is not the one lockstep was built with, or lacks what is asked of "
       "it. `lockstep doctor` shows which libraries are loaded and from where."},
      {Code::kBoard, "board problem",
       "The board is the shared-memory file through which a run shows its state. It could not be "
       "made, or it belongs to another version or user."},
      {Code::kRecord, "bad result record",
       "A result record (--json) is not valid JSON, lacks a field, or has another schema number "
       "than this version of lockstep reads."},
      {Code::kProgramFailed, "a program failed",
       "A program that lockstep started ended with an error, or threw an exception of its own, "
       "such as one about a missing data file. Its message and log are quoted."},
      {Code::kOutOfMemory, "out of memory",
       "The system did not give the memory a tensor needs. Use smaller batches, a smaller model "
       "or fewer logical devices: each holds a whole copy of the model."},
      {Code::kWorld, "the launcher's variables do not fit",
       "A program learns its rank from variables such as RANK, WORLD_SIZE and LOCAL_RANK, or "
       "from those of mpirun and srun. One is missing, is not a number, or contradicts another. "
       "Start the program with `lockstep run -n N`, or alone with none of them set."},
      {Code::kBackend, "no such communication backend",
       "The requested backend is unknown, is not installed, or cannot reach all ranks: self "
       "serves one rank, shm the ranks of one host, gloo several hosts, mpi ranks that mpirun or "
       "srun --mpi=pmix started, nccl ranks with a GPU each, ipc ranks that share one. `lockstep "
       "doctor` lists what is here."},
      {Code::kRendezvous, "rendezvous failed",
       "Before training, all ranks connect to one address. A rank or host was missing, appeared "
       "twice, or had another token or another size of the job; or too few hosts were left for a "
       "restart. The message says who was there and who was missing."},
      {Code::kCallMismatch, "ranks made different calls",
       "All ranks must make the same collective calls in the same order, with the same dtype and "
       "count. They did not, so nothing was sent. The message says what each rank called. The "
       "usual cause is an `if` on the rank, or on data that differs between ranks, around a "
       "forward, a backward or a collective."},
      {Code::kRankAbsent, "a rank did not arrive",
       "A rank waited for another until its deadline. The message names the call and the missing "
       "ranks, and says whether such a process is stopped, busy or gone. Set the deadline with "
       "--timeout of `lockstep run`, or LOCKSTEP_TIMEOUT_S."},
      {Code::kRankFailed, "another rank failed",
       "A rank ended or gave up while this one needed it. This rank is a victim: look at the one "
       "that the message names."},
      {Code::kUnusedParameter, "a parameter has no gradient",
       "Backward ended and a parameter took no part in the loss, so its bucket could not be "
       "averaged. Use the parameter in forward, freeze it with requires_grad_(false), or set "
       "find_unused_parameters if the parameters in use change from step to step."},
      {Code::kSyncMisuse, "step and synchronisation do not fit",
       "A forward and its backward must both be inside no_sync, or both outside; a synchronised "
       "backward must be finished before the next forward. Otherwise gradients would silently "
       "differ between ranks."},
      {Code::kReplicasDiffer, "models differ between ranks",
       "Every rank must build the same model: the same parameters in the same order with the "
       "same shapes and dtypes, and after each step the same values. The message names the first "
       "difference and the ranks."},
      {Code::kLaunch, "a program cannot be started",
       "`lockstep run` starts the program that follows its flags. It was not found, is not "
       "executable, or the system refused to start a process. Nothing is left running."},
      {Code::kScalerMisuse, "a GradScaler was called out of order",
       "Between two update() calls each optimizer is ready, then unscaled (by unscale_, or by "
       "step itself), then stepped. A second unscale_ would divide gradients twice, a second "
       "step would apply them twice, and an update() without a step has nothing to judge the "
       "scale by."},
      {Code::kSchedule, "a pipeline schedule does not exist, fit or end",
       "A schedule lists, for each pipeline rank, the forwards and backwards of its stages in "
       "order. Every micro-batch must pass every stage once each way, and no rank may wait for "
       "an action that another can only do later. The message names the rank and the action."},
      {Code::kStageFailed, "a stage of a pipeline failed",
       "The module of a stage threw in a forward or backward. The message names the stage, the "
       "micro-batch, the device and the rank, and shows the schedule with the action marked. All "
       "other stages have stopped. The gradients of that step are incomplete: clear them."},
      {Code::kStageMismatch, "stages of a pipeline do not fit together",
       "A stage got another shape or dtype than it had agreed on with the one before, the batch "
       "has fewer rows than micro-batches, or the ranks of a pipeline were given different "
       "numbers. The message says what was expected and what came."},
      {Code::kCapture, "a step cannot be captured",
       "A CUDA graph records what is queued on the GPU. It cannot contain code that waits for "
       "the GPU (item(), cpu(), printing a tensor), that branches on a tensor's values, or that "
       "uses another stream. The message names the operation. Move it out of the step function, "
       "or run the step without capture (--capture off, CaptureOptions::enabled)."},
      {Code::kNonfinite, "a gradient or a loss is not finite",
       "A gradient of this rank has an element that is infinite or not a number. The mean would "
       "pass it on to the weights of all ranks. The message names rank, step and parameter. Look "
       "at that rank's batch first (a row of NaN, a logarithm or a square root of 0, a division "
       "by 0); then try a smaller learning rate, clipping, or a GradScaler with fp16. "
       "DdpOptions::nonfinite chooses between a warning, a stop and silence."},
      {Code::kCheckpoint, "what was computed could not be saved",
       "The work was done, but a checkpoint, a file of results or the output could not be written: "
       "the disk was full, failed or became read-only. Files that were there before, and "
       "checkpoints that were saved earlier, are intact. Make room or repair the disk; a program "
       "with checkpoints resumes from the latest when it is started again."},
  };
  return codes;
}

std::string code_name(Code code) {
  return fmt::format("LS{:04}", static_cast<int>(code));
}

int exit_code(Code code) {
  switch (code) {
    case Code::kInternal:
    case Code::kReplicaFailed:
    case Code::kProgramFailed:
    case Code::kOutOfMemory:
    case Code::kCallMismatch:
    case Code::kRankAbsent:
    case Code::kRankFailed:
    case Code::kUnusedParameter:
    case Code::kSyncMisuse:
    case Code::kReplicasDiffer:
    case Code::kScalerMisuse:
    case Code::kStageFailed:
    case Code::kStageMismatch:
    case Code::kCapture:
    case Code::kNonfinite:
    case Code::kCheckpoint:
      return 1;
    default:
      return 2;
  }
}

Error::Error(Code code, std::string message, std::string help, std::vector<std::string> notes)
    : std::runtime_error(format_block(code, message, help, notes)),
      code_(code),
      message_(std::move(message)),
      help_(std::move(help)),
      notes_(std::move(notes)) {}

std::string describe(const std::exception& error) {
  std::string text = error.what();
  const size_t trace = text.find("\nException raised from ");
  if (trace != std::string::npos) text.resize(trace);
  return text;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
  std::string best;
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const auto& candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

}  // namespace lockstep
