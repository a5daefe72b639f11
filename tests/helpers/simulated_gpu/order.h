// What is ordered before what on the simulated devices: a vector clock for each stream and one for the host, and the
// copies that run as late as they may. What nothing orders is written to a file with the Python stacks of both sides.
#pragma once

#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/csrc/utils/pybind.h>

#include <deque>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace simulated {

using Time = uint64_t;
using Stack = std::shared_ptr<torch::CapturedTraceback>;

// One lock for all. Nobody who holds it may wait for Python's: stacks are taken before, reports written afterwards.
inline std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

inline size_t setting(const char* name, size_t otherwise) {
  const char* given = std::getenv(name);
  return given && *given ? std::stoull(given) : otherwise;
}

// ---- clocks ---------------------------------------------------------------------------------------------------

// The latest time of each stream that is known to be past.
class Clock {
 public:
  Time of(int stream) const { return stream < static_cast<int>(times_.size()) ? times_[stream] : 0; }
  void set(int stream, Time time) {
    if (stream >= static_cast<int>(times_.size())) times_.resize(stream + 1);
    times_[stream] = time;
  }
  void join(const Clock& other) {
    for (size_t s = 0; s < other.times_.size(); s++) set(s, std::max(of(s), other.times_[s]));
  }
  bool covers(const Clock& other) const {
    for (size_t s = 0; s < other.times_.size(); s++)
      if (of(s) < other.times_[s]) return false;
    return true;
  }

 private:
  std::vector<Time> times_;
};

struct StreamState {
  int device;
  Clock clock;
};
inline std::vector<StreamState> streams;  // the devices' default streams first
inline Clock host;                        // what the host has waited for; the device is infinitely slow

inline thread_local int current_device = 0;
inline thread_local std::vector<int> current_streams;

constexpr int MOST_DEVICES = 8;

// The devices' numbers on this machine, as CUDA counts them: up to the first name that is not there.
inline const std::vector<int>& visible_devices() {
  static std::vector<int> visible;
  static pid_t counted_by = 0;
  if (counted_by == getpid()) return visible;  // a fork may have another environment
  counted_by = getpid();
  visible.clear();
  int all = static_cast<int>(setting("SIMULATED_GPUS", 1));
  const char* names = std::getenv("CUDA_VISIBLE_DEVICES");
  for (int device = 0; !names && device < all; device++) visible.push_back(device);
  std::istringstream list(names ? names : "");
  for (std::string name; std::getline(list, name, ',');) {
    int device = name.empty() ? -1 : std::atoi(name.c_str());
    if (device < 0 || device >= all) break;
    visible.push_back(device);
  }
  return visible;
}
inline int number_of_devices() { return static_cast<int>(visible_devices().size()); }

inline int current_stream(int device) {
  while (static_cast<int>(current_streams.size()) <= device) current_streams.push_back(current_streams.size());
  return current_streams[device];
}

// ---- reports --------------------------------------------------------------------------------------------------

struct Report {
  std::string text;
  Stack here, before;
};
inline std::vector<Report> reports;

inline Stack stack() { return torch::CapturedTraceback::gather(true, false, false); }

inline std::string written(const Stack& stack) {
  if (!stack) return "      (no Python frame)\n";
  auto found = torch::symbolize({stack.get()});
  std::string text;
  for (auto number : found.tracebacks.at(0)) {
    auto& frame = found.all_frames.at(number);
    text += "      " + frame.filename + ":" + std::to_string(frame.lineno) + " " + frame.funcname + "\n";
  }
  return text;
}

inline void append(const std::string& ending, const std::string& text) {
  const char* folder = std::getenv("SIMULATED_GPU_REPORTS");
  if (!folder) { std::cerr << "simulated GPU: " << text; return; }
  std::ofstream(std::string(folder) + "/" + std::to_string(getpid()) + ending, std::ios::app) << text;
}

// Writes what was found, each pair of places once. Without the lock.
inline void write_reports() {
  std::vector<Report> found;
  { Lock lock(mutex); found.swap(reports); }
  if (found.empty() || !Py_IsInitialized()) return;
  py::gil_scoped_acquire python;
  static std::set<std::string> known;
  for (auto& report : found) {
    auto places = written(report.here) + (report.before ? "    before it:\n" + written(report.before) : "");
    auto kind = report.text.substr(0, report.text.find(" bytes"));
    if (known.insert(kind.substr(0, kind.rfind(',')) + places).second) append(".report", report.text + "\n" + places);
  }
}

// A place where the host waits for a device; with SIMULATED_GPU_WAITS=1 it is written with its stack.
inline void note_wait(const std::string& kind) {
  if (!setting("SIMULATED_GPU_WAITS", 0)) return;
  py::gil_scoped_acquire python;
  append(".waits", "wait: " + kind + "\n" + written(stack()));
}

// ---- late copies ----------------------------------------------------------------------------------------------

// A copy of page-locked memory that was asked for and has not run; `device` and `host` are its ranges of addresses.
struct LateCopy {
  int stream;
  Time time;
  std::function<void()> run;
  uintptr_t device_begin, device_end, host_begin, host_end;
};
inline std::deque<LateCopy> late_copies;

// Run the copies that are past for somebody with this clock, in the order in which they were asked for.
inline void run_copies(const Clock& clock) {
  for (auto copy = late_copies.begin(); copy != late_copies.end();) {
    if (copy->time > clock.of(copy->stream)) { ++copy; continue; }
    auto run = std::move(copy->run);
    copy = late_copies.erase(copy);
    run();
  }
}

inline void host_waits_for(const Clock& clock) {
  host.join(clock);
  run_copies(host);
}

// A place in the stream's order for work that is asked for now.
inline Time enqueue(int stream) {
  auto& clock = streams[stream].clock;
  clock.join(host);
  clock.set(stream, clock.of(stream) + 1);
  return clock.of(stream);
}

// The same for a kernel: it runs now, so the copies that it is ordered after run before.
inline void launch(int stream) {
  enqueue(stream);
  run_copies(streams[stream].clock);
}

// A copy does not run those before it in its stream: who does not wait for any must not find what it copied.
inline void enqueue_copy(int stream, uintptr_t begin, uintptr_t end, uintptr_t host_begin, uintptr_t host_end) {
  enqueue(stream);
  for (auto& copy : late_copies) {
    bool touches = (copy.device_begin < end && begin < copy.device_end) ||
                   (copy.host_begin < host_end && host_begin < copy.host_end);
    if (touches && copy.time <= streams[stream].clock.of(copy.stream)) return run_copies(streams[stream].clock);
  }
}

}  // namespace simulated
