// NCCL's place: gloo on the devices' memory, ordered on a stream of its own. The data move at once, when all ranks have
// called; a rank that calls another collective than the others gets an error where NCCL would hang or mix data.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "kernels.h"

namespace simulated {

using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;

struct Work final : c10d::Work {
  Clock clock;
  int device;
  Tensors kept;  // until it is waited for, as NCCL's

  Work(OpType type, Clock end, int on, Tensors tensors)
      : c10d::Work(-1, type), clock(std::move(end)), device(on), kept(std::move(tensors)) {}
  bool isCompleted() override {
    Lock lock(mutex);
    return host.covers(clock);
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    {
      Lock lock(mutex);
      streams[current_stream(device)].clock.join(clock);
    }
    kept.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return kept; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(kept));
    return future;
  }
};
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

class Nccl final : public c10d::Backend {
 public:
  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : c10d::Backend(rank, size), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "nccl"; }
  void eagerConnectSingleDevice(at::Device) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  WorkPointer endCoalescing() override {
    int own = stream(current_device);
    Lock lock(mutex);
    return c10::make_intrusive<Work>(OpType::COALESCED, streams[own].clock, current_device, Tensors{});
  }

  WorkPointer broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return call(OpType::BROADCAST, {}, t, o.asyncOp, [&] { auto a = on_cpu(t); gloo_->broadcast(a, o)->wait(); });
  }
  WorkPointer allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return call(OpType::ALLREDUCE, t, t, o.asyncOp, [&] { reduce_in_place(on_cpu(t), o.reduceOp); });
  }
  WorkPointer allreduce_coalesced(Tensors& t, const c10d::AllreduceCoalescedOptions& o) override {
    for (auto& tensor : t) { Tensors one{tensor}; allreduce(one, o); }
    return endCoalescing();
  }
  WorkPointer reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return call(OpType::REDUCE, t, t, o.asyncOp, [&] {
      auto a = on_cpu(t);
      auto plain = o;
      plain.reduceOp = summed(o.reduceOp);
      gloo_->reduce(a, plain)->wait();
      if (o.reduceOp == ReduceOp::AVG && getRank() == o.rootRank) a[0].div_(getSize());
    });
  }
  WorkPointer allgather(TensorLists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return call(OpType::ALLGATHER, in, out[0], o.asyncOp, [&] {
      TensorLists a{on_cpu(out[0])};
      auto b = on_cpu(in);
      gloo_->allgather(a, b, o)->wait();
    });
  }
  WorkPointer _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return call(OpType::_ALLGATHER_BASE, {in}, {out}, o.asyncOp, [&] {
      auto a = simulated::on_cpu(out), b = simulated::on_cpu(in).clone();  // `in` may be a part of `out`
      gloo_->_allgather_base(a, b, o)->wait();
    });
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto each = o;
    each.asyncOp = true;
    for (size_t i = 0; i < out.size(); i++) _allgather_base(out[i], in[i], each);
    return endCoalescing();
  }
  WorkPointer _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return call(OpType::_REDUCE_SCATTER_BASE, {in}, {out}, o.asyncOp, [&] {
      auto all = simulated::on_cpu(in).clone().view({-1});
      reduce_in_place({all}, o.reduceOp);
      simulated::on_cpu(out).view({-1}).copy_(all.narrow(0, out.numel() * getRank(), out.numel()));
    });
  }
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    auto each = o;
    each.asyncOp = true;
    for (size_t i = 0; i < out.size(); i++) _reduce_scatter_base(out[i], in[i], each);
    return endCoalescing();
  }
  WorkPointer reduce_scatter(Tensors& out, TensorLists& in, const c10d::ReduceScatterOptions& o) override {
    return call(OpType::REDUCE_SCATTER, in[0], out, o.asyncOp, [&] {
      for (int rank = 0; rank < getSize(); rank++) {
        auto part = simulated::on_cpu(in[0][rank]).clone();
        reduce_in_place({part}, o.reduceOp);
        if (rank == getRank()) simulated::on_cpu(out[0]).copy_(part);
      }
    });
  }
  WorkPointer gather(TensorLists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return call(OpType::GATHER, in, out.empty() ? Tensors{} : out[0], o.asyncOp, [&] {
      TensorLists a;
      if (!out.empty()) a.push_back(on_cpu(out[0]));
      auto b = on_cpu(in);
      gloo_->gather(a, b, o)->wait();
    });
  }
  WorkPointer scatter(Tensors& out, TensorLists& in, const c10d::ScatterOptions& o) override {
    return call(OpType::SCATTER, in.empty() ? Tensors{} : in[0], out, o.asyncOp, [&] {
      TensorLists a;
      if (!in.empty()) a.push_back(on_cpu(in[0]));
      auto b = on_cpu(out);
      gloo_->scatter(b, a, o)->wait();
    });
  }
  WorkPointer alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from,
                            const c10d::AllToAllOptions& o) override {
    return call(OpType::ALLTOALL_BASE, {in}, {out}, o.asyncOp, [&] {
      auto a = simulated::on_cpu(out), b = simulated::on_cpu(in);
      gloo_->alltoall_base(a, b, to, from, o)->wait();
    });
  }
  WorkPointer send(Tensors& t, int to, int tag) override {
    return call(OpType::SEND, t, {}, false, [&] { auto a = on_cpu(t); gloo_->send(a, to, tag)->wait(); });
  }
  WorkPointer recv(Tensors& t, int from, int tag) override {
    return call(OpType::RECV, {}, t, false, [&] { auto a = on_cpu(t); gloo_->recv(a, from, tag)->wait(); });
  }
  WorkPointer barrier(const c10d::BarrierOptions& o) override {
    require_same_call("barrier", {});
    gloo_->barrier(o)->wait();
    wait_for_device(current_device);
    return c10::make_intrusive<Work>(OpType::BARRIER, Clock(), current_device, Tensors{});
  }

 private:
  static Tensors on_cpu(const Tensors& tensors) {
    Tensors made;
    for (const auto& tensor : tensors) made.push_back(simulated::on_cpu(tensor));
    return made;
  }
  static ReduceOp summed(const ReduceOp& op) { return op == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : op; }
  void reduce_in_place(Tensors t, const ReduceOp& op) {  // gloo has no average
    c10d::AllreduceOptions options;
    options.reduceOp = summed(op);
    gloo_->allreduce(t, options)->wait();
    if (op == ReduceOp::AVG) for (auto& tensor : t) tensor.div_(getSize());
  }
  int stream(int device) {
    auto [found, is_new] = streams_.try_emplace(device, -1);
    if (is_new) found->second = new_stream(device);
    return found->second;
  }

  // The move of data between `reads` and `writes`, after what the current stream has been asked for.
  template <class F>
  WorkPointer call(OpType type, const Tensors& reads, const Tensors& writes, bool is_async, F move) {
    std::string op = c10d::opTypeToString(type);
    Tensors all = writes;
    all.insert(all.end(), reads.begin(), reads.end());
    for (auto& tensor : all) {
      TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu (", op, " of nccl)");
      TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous (", op, " of nccl)");
    }
    int device = all.empty() ? current_device : all[0].get_device(), own = stream(device);
    Clock end;
    auto here = stack();
    {
      Lock lock(mutex);
      int current = current_stream(device), used = is_async ? own : current;
      streams[used].clock.join(streams[current].clock);
      launch(used);
      for (auto& tensor : reads) touch(tensor, used, false, op, here);
      for (auto& tensor : writes) touch(tensor, used, true, op, here);
      end = streams[used].clock;
    }
    write_reports();
    if (type != OpType::SEND && type != OpType::RECV) require_same_call(op, reads.empty() ? writes : reads);
    move();
    return c10::make_intrusive<Work>(type, std::move(end), device, std::move(all));
  }

  void require_same_call(const std::string& op, const Tensors& tensors) {
    std::ostringstream text;
    text << op << " number " << ++calls_ << " of its group";
    if (!tensors.empty() && tensors[0].defined()) text << ", " << tensors[0].numel() << " of " << tensors[0].dtype();
    auto own = at::zeros({128}, at::kByte), all = at::empty({128 * getSize()}, at::kByte);
    std::memcpy(own.data_ptr(), text.str().data(), std::min<size_t>(text.str().size(), 127));
    gloo_->_allgather_base(all, own, {})->wait();
    for (int rank = 0; rank < getSize(); rank++) {
      std::string theirs(static_cast<char*>(all.data_ptr()) + 128 * rank);
      std::string mine(static_cast<char*>(own.data_ptr()));
      if (theirs == mine) continue;
      auto found = "RANKS disagree: " + std::to_string(getRank()) + " calls " + mine + ", " + std::to_string(rank) + " calls " + theirs;
      { Lock lock(mutex); reports.push_back({found, nullptr, nullptr}); }
      write_reports();
      TORCH_CHECK(false, "simulated GPU: ", found);
    }
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<int, int> streams_;
  uint64_t calls_ = 0;
};

}  // namespace simulated
