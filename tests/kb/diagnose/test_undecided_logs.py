"""Logs that do not say why a job failed, and logs of jobs that did not fail: neither has a cause for an answer.

Each line is printed as the software prints it, with numbers of our own. A text that more than one cause prints belongs
into `UNDECIDED`, with the entry that it was taken for; what healthy jobs print belongs into `HEALTHY`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.next_step import CERTAIN, LIKELY

Answer = Callable[..., Diagnosis]

STEP = "step {0} | loss 2.{0} | 412 ms\n"

FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {0}.00 MiB. GPU 0 has a total capacity of 47.41 GiB of "
    "which 99.81 MiB is free. Including non-PyTorch memory, this process has 47.30 GiB memory in use.\n"
)
# Where memory ran out, and of what, is in the frames above the line; these are of no entry.
FULL_OF_WEIGHTS = (
    '  File "/srv/train.py", line 52, in main\n    model = model.to(device)\n'
    '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1340, in to\n'
    "    return self._apply(convert)\n" + FULL.format(170)
)
FULL_OF_COPIES = (
    '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/parallel/data_parallel.py", line 184, in forward\n'
    "    replicas = self.replicate(self.module, self.device_ids[: len(inputs)])\n"
    '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/parallel/replicate.py", line 110, in replicate\n'
    "    param_copies = _broadcast_coalesced_reshape(params, devices, detach)\n" + FULL.format(96)
)

UNDECIDED = {
    "MIG as often as a wrong CUDA_VISIBLE_DEVICES": (
        "visible-devices-mismatch",
        'RuntimeError: device >= 0 && device < num_gpus INTERNAL ASSERT FAILED at "../aten/src/ATen/cuda/CUDAContext.cpp":49, '
        "please report a bug to PyTorch. device=3, num_gpus=2\n",
    ),
    "NCCL in mid-run binds to free ports": (
        "address-in-use",
        STEP.format(811)
        + "gpu-7:3310:3402 [5] misc/socket.cc:426 NCCL WARN Call to bind failed: Address already in use\n",
    ),
    "a bus error that no parent speaks for": ("dataloader-shm-bus-error", STEP.format(3) + "Bus error (core dumped)\n"),
    "a bus error in faulthandler's words": ("shm-too-small", "Fatal Python error: Bus error\n"),
    "out of memory alone": ("oom-activations", STEP.format(70) + FULL.format(512)),
    "out of memory, weights": ("oom-activations", FULL_OF_WEIGHTS),
    "out of memory, copies of DataParallel": ("oom-activations", FULL_OF_COPIES),
    "out of memory of XLA": (
        "oom-activations",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3221225472 bytes.\n",
    ),
    "a loop that survives out of memory": (
        "oom-masked-as-nccl-timeout",
        "| WARNING: ran out of memory, skipping this batch.\n" + STEP.format(71) + STEP.format(72),
    ),
    "no driver in the container, as the CUDA runtime says it": (
        "driver-too-old",
        "gpu-2: Test CUDA failure common.cu:1007 'CUDA driver version is insufficient for CUDA runtime version'\n",
    ),
    "a port that came back, and a job that went on for a while": (
        "ib-link-flapping",
        STEP.format(12)
        + "gpu-3:2011:2043 [4] transport/net_ib.cc:214 NCCL WARN NET/IB : mlx5_5:1 Got non-fatal async event: port error(10)\n"
        + STEP.format(13)
        + STEP.format(93)
        + FULL.format(640),
    ),
    "NCCL without GPUDirect RDMA, and a job that went on for a while": (
        "gpudirect-rdma-off",
        "gpu-3:2011:2043 [4] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'\n"
        "gpu-3:2011:2043 [4] NCCL INFO Channel 00/0 : 12[4] -> 20[4] [send] via NET/IB/0\n"
        + STEP.format(93)
        + FULL.format(640),
    ),
    "a module that somebody tried to load before the job": (
        "gpudirect-rdma-off",
        "modprobe: ERROR: could not insert 'nvidia_peermem': Invalid argument\n" + STEP.format(93) + FULL.format(640),
    ),
    "any loss that no parameter leads to": (
        "grad-checkpoint-no-grad",
        "    loss.backward()\nRuntimeError: element 0 of tensors does not require grad and does not have a grad_fn\n",
    ),
    "an index that a program computed": (
        "device-side-assert-index",
        "    row = table[n]\nIndexError: index 64 is out of bounds for dimension 0 with size 64\n",
    ),
    "a layer of another model, not a vocabulary": (
        "tokenizer-embedding-mismatch",
        'ValueError: Trying to set a tensor of shape torch.Size([11008, 4096]) in "weight" (which has shape '
        "torch.Size([14336, 4096])), this look incorrect.\n",
    ),
    "a bitsandbytes that sees no GPU": (
        "extension-abi-mismatch",
        "AttributeError: /opt/venv/lib/python3.11/site-packages/bitsandbytes/libbitsandbytes_cpu.so: undefined symbol: "
        "cquantize_blockwise_fp16_nf4\n",
    ),
    "memory that was not registered, without the errno": (
        "memlock-ulimit",
        "node-2:910:977 [0] misc/ibvwrap.cc:250 NCCL WARN Call to ibv_reg_mr failed\n",
    ),
    "another wrapping of the model": (
        "resume-world-size-mismatch",
        "RuntimeError: Error(s) in loading state_dict for FullyShardedDataParallel:\n\tsize mismatch for _flat_param: copying a "
        "param with shape torch.Size([40960]) from checkpoint, the shape in current model is torch.Size([20480]).\n",
    ),
    "one GPU for each rank, two processes on it": (
        "oom-all-ranks-on-gpu0",
        "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 79.11 "
        "GiB of which 12.06 MiB is free. Process 4120 has 30.20 GiB memory in use. Process 4188 has 9.31 GiB memory in use. "
        "Of the allocated memory 38.10 GiB is allocated by PyTorch, and 812.04 MiB is reserved by PyTorch but unallocated.\n",
    ),
    "a library of another compiler, not of CUDA": (
        "cuda-library-missing",
        "OSError: /opt/venv/lib/libtorch_cpu.so: undefined symbol: GOMP_parallel, version libgomp.so.1\n",
    ),
    "a launcher that ignores a variable, harmless where it names the same GPUs": (
        "visible-devices-mismatch",
        "[2026-03-02 10:02:01,512] [WARNING] [runner.py:215:main] Detected VISIBLE_DEVICES=0,1 but ignoring it because one or "
        "several of --include/--exclude/--num_gpus/--num_nodes cl args were used.\n",
    ),
    "the barrier of a group that was made late": (
        "rendezvous-timeout",
        "RuntimeError: Timed out initializing process group in store based barrier on rank: 5, for key: "
        "store_based_barrier_key:4 (world_size=8, worker_count=7, timeout=0:30:00)\n",
    ),
    "an object that a checkpoint cannot hold": (
        "spawn-pickling",
        '  File "/srv/train.py", line 210, in save\n    torch.save(state, path)\n'
        "AttributeError: Can't pickle local object 'main.<locals>.schedule'\n",
    ),
    "a class that the reader of a checkpoint does not have": (
        "spawn-pickling",
        '  File "/srv/read.py", line 3, in <module>\n    state = torch.load("last.pt", weights_only=False)\n'
        "AttributeError: Can't get attribute 'Schedule' on <module '__main__' (built-in)>\n",
    ),
    "a configuration that fits no module, after which the job went on": (
        "moe-zero3-hang",
        "[2026-03-02 10:02:41,300] [WARNING] [logger.py:107:warning_once] ZeRO leaf module configuration did not match any "
        "modules; hooks will be applied as usual\n" + STEP.format(93) + FULL.format(640),
    ),
    "a build that takes long, not one that died": (
        "stale-cache-lock",
        'UserWarning: Waited on lock file "/root/.cache/torch_extensions/py311_cu128/ops/lock" for 30 seconds\n',
    ),
    "a rank that waits for the compiler of another one": (
        "stale-cache-lock",
        '  File "/opt/venv/lib/python3.11/site-packages/torch/utils/file_baton.py", line 42, in wait\n'
        "    time.sleep(self.wait_seconds)\nKeyboardInterrupt\n",
    ),
    "a wheel of another toolkit, or of another GPU": (
        "no-kernel-image",
        "RuntimeError: CUDA error: invalid device function\n",
    ),
    "a GPU that torch cannot use and nobody asked for": (
        "no-kernel-image",
        "UserWarning: NVIDIA T400 4GB with CUDA capability sm_75 is not compatible with the current PyTorch installation.\n",
    ),
    "the interpreter's lock at the end of any collective timeout": (
        "watchdog-heartbeat-stuck",
        "[rank2]:[E302 10:02:44.310022117 ProcessGroupNCCL.cpp:1316] [PG ID 0 PG GUID 0(default_pg) Rank 2] Could not acquire GIL "
        "within 300 ms on exit, possible GIL induced hang\n",
    ),
    "xFormers, without which the job goes on": (
        "extension-abi-mismatch",
        "WARNING[XFORMERS]: xFormers can't load C++/CUDA extensions. xFormers was built for:\n"
        "    PyTorch 2.8.0+cu128 with CUDA 1208 (you have 2.9.1+cu128)\n",
    ),
    "shards that one wants": (
        "zero3-empty-weights",
        "[2026-03-02 11:40:12,100] [INFO] [engine.py:3912:save_16bit_model] Did not save the model out/pytorch_model.bin because "
        "stage3_gather_16bit_weights_on_model_save is False\n",
    ),
    "a git-lfs pointer, not an empty adapter": (
        "lora-adapter-save-empty",
        "-rw-rw-r-- 1 ubuntu ubuntu   134 Aug  9 04:55 adapter_model.safetensors\n",
    ),
}

HEALTHY = {
    "NCCL looks for what is not there": (
        "gpu-1:70:70 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal net plugin.\n"
        "gpu-1:70:91 [0] NCCL INFO NET/IB : No device found.\n"
        "gpu-1:70:91 [0] NCCL INFO Could not enable P2P between dev 1(=19000) and dev 0(=18000)\n"
        "gpu-1:70:91 [0] NCCL INFO comm 0x5591 rank 0 nranks 2 cudaDev 0 busId 18000 - Init COMPLETE\n"
    ),
    "DeepSpeed at its start": (
        "[2026-03-02 10:02:11,512] [INFO] [comm.py:652:init_distributed] cdb=None\n"
        "[2026-03-02 10:02:11,513] [INFO] [comm.py:683:init_distributed] Initializing TorchBackend in DeepSpeed with backend nccl\n"
        "[2026-03-02 10:03:40,100] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
        "Attempted loss scale: 65536, reducing to 32768\n"
    ),
    "a barrier that guesses its GPU, torch 2.6": (
        "[rank1]:[W302 10:02:44.310022117 ProcessGroupNCCL.cpp:4561] [PG ID 0 PG GUID 0 Rank 1]  using GPU 1 to perform barrier "
        "as devices used by this process are currently unknown. This can potentially cause a hang if this rank to GPU mapping "
        "is incorrect. Specify device_ids in barrier() to force use of a particular device, or call init_process_group() with "
        "a device_id.\n"
    ),
    "a barrier that guesses its GPU, torch 2.9": (
        "[rank0]:[W302 10:02:44.310022117 ProcessGroupNCCL.cpp:5188] Guessing device ID based on global rank. This can cause a "
        "hang if rank to GPU mapping is heterogeneous. You can specify device_id in init_process_group()\n"
    ),
    "a download that was tried again": (
        "[rank0]: '(ReadTimeoutError(\"HTTPSConnectionPool(host='hub.example.org', port=443): Read timed out. (read timeout=10)\"), "
        "'(Request ID: 5f0c)')' thrown while requesting GET https://hub.example.org/models/a/resolve/main/model.safetensors\n"
        "[rank0]: Retrying in 1s [Retry 1/5].\n"
    ),
    "Lightning's bar before there is a loss": (
        "Epoch 0:   1%|1         | 2/200 [00:00<00:59,  3.31it/s, loss=nan, v_num=4]\n"
        "Epoch 0:   2%|2         | 4/200 [00:01<00:58,  3.32it/s, loss=6.1, v_num=4]\n"
    ),
    "the names of a model in memory": (
        "trainable: module.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight\n"
    ),
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_a_text_of_several_causes_makes_none_certain(answer: Answer, name: str) -> None:
    taken_for, log = UNDECIDED[name]
    findings = answer(log).findings
    assert [finding.id for finding in findings if finding.role == "root"] == []
    assert all(finding.confidence < CERTAIN for finding in findings)
    assert not any(finding.role == "root" for finding in findings if finding.id == taken_for)


@pytest.mark.parametrize("name", [name for name in UNDECIDED if name.startswith("out of memory")])
def test_out_of_memory_says_what_happened_and_not_why(answer: Answer, name: str) -> None:
    diagnosis = answer(UNDECIDED[name][1])
    assert diagnosis.unexplained
    assert all(finding.confidence < LIKELY for finding in diagnosis.findings)
    assert diagnosis.ranks.first_failure is not None


@pytest.mark.parametrize("name", HEALTHY)
def test_what_healthy_jobs_print_is_no_finding(answer: Answer, name: str) -> None:
    log = STEP.format(1) + HEALTHY[name] + "".join(STEP.format(number) for number in range(2, 30))
    diagnosis = answer(log)
    assert diagnosis.findings == ()
    assert (diagnosis.unexplained, diagnosis.ranks.failed_first, diagnosis.failures) == (False, None, ())
